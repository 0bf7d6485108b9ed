"""From text to tokens and back: bytes, a list of tokens like that of RWKV, or a file of `tokenizers`."""

import ast
import codecs
import importlib.util
from pathlib import Path

LIST = "rwkv_vocab_v20230424.txt"  # in the package `rwkv`
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # what files of `tokenizers` call the end of a text


class Vocabulary:
    """The bytes of every token: one byte each, or those of a file like rwkv_vocab_v20230424.txt."""

    def __init__(self, path: Path | None):
        self.pieces = {byte: bytes([byte]) for byte in range(256)}
        self.end = None if path is None else 0  # the token between texts
        if path is not None:
            self.pieces = {self.end: b"", **self.read(path)}
        self.tokens = {piece: token for token, piece in self.pieces.items()}
        if any(bytes([byte]) not in self.tokens for byte in range(256)):
            raise ValueError(f"{path} is no vocabulary: expected a token for each single byte")
        self.longest = max(map(len, self.tokens))
        self.largest = max(self.pieces)  # token

    @staticmethod
    def read(path: Path) -> dict[int, bytes]:
        """Return the tokens of a file, whose lines are: number, the text as Python writes it, length."""
        pieces = {}
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                token, _, rest = line.partition(" ")
                try:
                    piece = ast.literal_eval(rest.rpartition(" ")[0])
                    pieces[int(token)] = piece.encode() if isinstance(piece, str) else bytes(piece)
                except (ValueError, SyntaxError, TypeError):
                    raise ValueError(f"{path} is no vocabulary: expected number, text, length; got {line!r}") from None
        return pieces

    def encode(self, text: bytes) -> list[int]:
        """Return the tokens of a text: the longest one that fits, again and again."""
        tokens, place = [], 0
        while place < len(text):
            ends = range(min(place + self.longest, len(text)), place, -1)
            end = next(end for end in ends if text[place:end] in self.tokens)
            tokens.append(self.tokens[text[place:end]])
            place = end
        return tokens

    def prompt(self, text: bytes) -> list[int]:
        """Return the tokens of a prompt, which begin with the one between texts."""
        return [*([] if self.end is None else [self.end]), *self.encode(text)]

    def decode(self, tokens: list[int]) -> str:
        """Return a text that a terminal can show."""
        return printable(b"".join(self.pieces.get(token, b"?") for token in tokens).decode(errors="replace"))

    def characters(self) -> "Characters":
        """Return what turns the tokens of a sequence into whole characters, one token after another."""
        return Characters(self.pieces)


class Characters:
    """Whole characters of tokens that have bytes: a part of one waits for the rest."""

    def __init__(self, pieces: dict[int, bytes]):
        self.pieces, self.decoder = pieces, codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Return the characters that a token completes."""
        return self.decoder.decode(self.pieces.get(token, b"?"))

    def end(self) -> str:
        """Return what stands for a part of a character that was never completed."""
        return self.decoder.decode(b"", final=True)


class TokenizerFile:
    """A vocabulary of the package `tokenizers`: a tokenizer.json."""

    def __init__(self, path: Path, end: str | None = None):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError(f"{path} needs tokenizers: pip install tokenizers") from None
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing more exact
            raise ValueError(f"{path} is no file of tokenizers: {error}") from None
        known = [self.tokenizer.token_to_id(name) for name in ([end] if end else ENDS)]
        self.end = next((token for token in known if token is not None), None)
        if end and self.end is None:
            raise ValueError(f"--end-token: {path} has no token {end!r}")
        self.largest = max(self.tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, text: bytes) -> list[int]:
        """Return the tokens of a text alone."""
        return self.tokenizer.encode(text.decode(), add_special_tokens=False).ids

    def prompt(self, text: bytes) -> list[int]:
        """Return the tokens of a prompt, with those that the file puts around it."""
        return self.tokenizer.encode(text.decode()).ids

    def decode(self, tokens: list[int]) -> str:
        """Return a text that a terminal can show."""
        return printable(self.tokenizer.decode(tokens))

    def characters(self) -> "TokenizerCharacters":
        """Return what turns the tokens of a sequence into whole characters, one token after another."""
        return TokenizerCharacters(self.tokenizer)


class TokenizerCharacters:
    """Whole characters of tokens that `tokenizers` decodes: each together with those before, as it may add spaces."""

    def __init__(self, tokenizer):
        self.tokenizer, self.tokens, self.begin, self.written = tokenizer, [], 0, 0

    def add(self, token: int) -> str:
        """Return the characters that a token completes."""
        self.tokens.append(token)
        new = self.new()
        if not new or new.endswith("\N{REPLACEMENT CHARACTER}"):  # part of a character
            return ""
        self.begin, self.written = self.written, len(self.tokens)
        return new

    def end(self) -> str:
        """Return what stands for a part of a character that was never completed."""
        return self.new()

    def new(self) -> str:
        """Return the text behind what was written."""
        before = self.tokenizer.decode(self.tokens[self.begin : self.written])
        return self.tokenizer.decode(self.tokens[self.begin :])[len(before) :]


def printable(text: str) -> str:
    """Return a text with a dot for each character that a terminal cannot show."""
    return "".join(x if x.isprintable() or x == "\n" else "\N{MIDDLE DOT}" for x in text)


def vocabulary_of(name: Path | None, end: str | None = None) -> Vocabulary | TokenizerFile:
    """Return the vocabulary of a file, of the package `rwkv` by this name, or of bytes."""
    if name is not None and name.suffix == ".json":
        return TokenizerFile(name, end)
    if end is not None:
        raise ValueError("--end-token is for a tokenizer.json")
    if name == Path("rwkv"):
        package = importlib.util.find_spec("rwkv")
        if package is None:
            raise ValueError("--vocabulary rwkv needs the package rwkv: pip install rwkv")
        name = Path(package.origin).with_name(LIST)
    return Vocabulary(name)
