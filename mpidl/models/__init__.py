"""Models written in the project, each in one file, and what they share.

gpt2, bert, resnet   the models
pretrained           published weights of GPT-2, in the files of Hugging Face's transformers
pretrained_bert      those of BERT
published            the names in such weights by model, and the settings files that go with them
segments             activation checkpointing inside these models, without a store; `mpidl.activations` serves any
"""
