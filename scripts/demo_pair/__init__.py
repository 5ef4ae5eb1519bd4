"""The parts of train_demo_pair.py: text, tokenizer, the two models, evaluation and card."""
