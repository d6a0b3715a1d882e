"""Vision-language-action policies: any image-text-to-text model of transformers that writes action tokens.

policy  the model, the tokens at the places of actions, and the hidden states there
flow    PI0, which writes actions as numbers: the inputs and errors of its flow loss
"""
