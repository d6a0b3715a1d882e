"""Vision-language-action policies: any image-text-to-text model of transformers that writes action tokens.

policy   the model, the tokens at the places of actions, and the hidden states there
actions  numbers as tokens: the bins into which the range of each number of an action is divided
"""
