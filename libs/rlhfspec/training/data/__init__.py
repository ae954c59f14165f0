"""Dataset rows, prompts, and the order of rows, without torch."""

from rlhfspec.training.data.order import Order
from rlhfspec.training.data.prompts import PromptRow, Prompts, load_tokenizer
from rlhfspec.training.data.rows import Rows, load_rows

__all__ = ["Order", "PromptRow", "Prompts", "Rows", "load_rows", "load_tokenizer"]
