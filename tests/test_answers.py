"""What shows of an answer: language, form, circles and refusals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccheck.grading.answers import language, refuses, repeats, see, structure_of


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("The order is on its way to you, and it should be there by the end of the week.", "en"),
        ("Die Bestellung ist auf dem Weg und wird bis zum Ende der Woche bei Ihnen sein.", "de"),
        ("La commande est en route et elle devrait être chez vous à la fin de la semaine.", "fr"),
        ("El pedido está en camino y debería llegar a su casa para el final de la semana.", "es"),
        ("O pedido está a caminho e deve chegar à sua casa até o final da semana, com nota.", "pt"),
        ("De bestelling is onderweg en zal voor het einde van de week bij u zijn, met post.", "nl"),
        ("Заказ уже в пути и должен прибыть к вам до конца недели.", "cyrillic"),
        ("订单已经发出，预计本周末之前送到您的家里。", "zh"),
        ("ご注文の商品は発送されました。週末までにお届けします。", "ja"),
        ("OK.", None),
        ("", None),
        ("def f(x):\n    return x * x", None),
        ("```\nder die und in den von zu das mit sich des auf für ist\n```", None),
    ],
)
def test_language(text, name):
    """Told from function words or script; a short text or code is not told."""
    assert language(text) == name


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("Plain words.", "prose"),
        ("", "empty"),
        ("- a\n- b", "bullets"),
        ("1. a\n2. b", "numbered list"),
        ('{"a": 1}', "JSON object"),
        ("[1]", "JSON array"),
        ('{"a": 1', "broken JSON"),
        ("# T\n```py\nx\n```", "code block + headings"),
        ("| a | b |\n|---|---|", "table"),
    ],
)
def test_structure(text, form):
    """The outer form in words."""
    assert structure_of(text) == form


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the cat sat on the mat and " * 20, True),
        (" ".join(f"word{i}" for i in range(200)), False),
        ("yes yes yes", False),
        ("我们今天去公园玩吧" * 30, True),
        ("", False),
    ],
)
def test_going_in_circles(text, expected):
    """Over half of the runs of words were there before; short answers never repeat."""
    assert repeats(text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I'm unable to provide that.", True),
        ("**I cannot assist** with this.", True),
        ("As an AI language model, I can't have opinions.", True),
        ("That is not something I can help with.", True),
        ("I must respectfully decline.", True),
        ("Ich kann dir dabei leider nicht helfen.", True),
        ("Lo siento, no puedo ayudar con eso.", True),
        ("抱歉，我无法提供这些信息。", True),
        ("Dear Ann, I am sorry for the delay.", False),
        ("You cannot open it because I did not write one.", False),
        ("Here is how you do it. " * 30 + "I cannot help with more.", False),
    ],
)
def test_refusals(text, expected):
    """Known phrases at the beginning of an answer, not apologies and not what comes much later."""
    assert refuses(text) is expected


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=300))
def test_every_text_can_be_looked_at(text):
    """No text raises."""
    seen = see(text)
    assert seen.empty == (not text.strip())
