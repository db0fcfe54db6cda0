"""The recipe's settings for a model that is trained in a second."""

from gptserve.weights.storyteller.recipe.train import Recipe

MINIATURE = Recipe(
    steps=12,
    vocab_size=400,
    tokenizer_stories=100,
    context_length=640,
    width=32,
    layers=1,
    heads=2,
    rows=2,
    row_length=576,
    long_every=4,
    peak_rate=1e-2,
    warm_up=2,
    cool_down=4,
    log_every=4,
    save_every=8,
)
