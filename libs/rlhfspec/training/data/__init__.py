"""Dataset rows, the prompts made of them, and the order in which steps take them. Torch-free.

Example:
    >>> from rlhfspec.training.data import Prompts, load_rows, load_tokenizer
    >>> Prompts.__name__, load_rows.__name__
    ('Prompts', 'load_rows')
"""

from rlhfspec.training.data.order import Order
from rlhfspec.training.data.prompts import PromptRow, Prompts, load_tokenizer
from rlhfspec.training.data.rows import Rows, load_rows

__all__ = ["Order", "PromptRow", "Prompts", "Rows", "load_rows", "load_tokenizer"]
