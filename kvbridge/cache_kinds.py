"""Which tokens of a request each kind of cache keeps, and when they may be read: the one rule, for adapters and agents.

What SGLang's prefix cache holds of a window beside it is in adapters/sglang/windows.py (`first_held`).

Pure. Imports nothing, so that adapters may use it inside engines.
"""

# A part of this name is that of the rest of the name, but each row is multiplied by the orthonormal Walsh-Hadamard
# matrix. So SGLang keeps index keys of some models: it multiplies queries too, and their products stay the same.
ROTATED = "rotated_"
INDEX_KEY = "index_key"
ROTATED_INDEX_KEY = ROTATED + INDEX_KEY

# Parts of such a name are what DeepSeek V4's next rows will be made of: kv and score of each token.
COMPRESSOR = "compressor"
# The window of what DeepSeek V4's rows of 4 tokens will be made of, in blocks of 4: of the row that is not whole, and
# of the one before. (A row is made of 8 tokens, its own last. So nothing is read of a row that is whole but the last.)
OPEN_4 = 5
# A part of this name is that of the rest of the name, but its scores lack the weight (`ape`) of a token's place in the
# row. So SGLang keeps them; vLLM adds the weight first. DeepSeek V4.1 has no such weight.
RAW = "raw_"


def first_kept(kind: str, window: int, end_token: int, block_tokens: int) -> int:
    """The first token that a cache must hold of a request of `end_token` tokens, whose next query is at `end_token`.

    `block_tokens` are those of one entry of the block table. The token begins an entry: an engine that keeps a block
    may reuse it, whole, for another request with the same prefix. (For one that does not they are 1.) A state is one
    row, in the entry of the last token.
    """
    match kind:
        case "full":
            return 0
        case "sliding":
            first = max(0, end_token + 1 - window)
        case "chunked":
            first = end_token // window * window
        case "state":
            first = max(0, end_token - 1)
        case _:
            raise ValueError(f"kind of cache: {kind}")
    return first // block_tokens * block_tokens


def is_late(kind: str) -> bool:
    """True if nothing of it may be read before all tokens are computed: the last one decides what is kept."""
    return kind != "full"
