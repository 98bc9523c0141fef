"""Models written in the project, each in one file, and what they share.

gpt2, bert, resnet   the models
pretrained           published weights of GPT-2, in the files of Hugging Face's transformers
pretrained_bert      those of BERT
published            the settings files that go with such weights
segments             activation checkpointing inside these models, without a store; `mpidl.activations` serves any
"""
