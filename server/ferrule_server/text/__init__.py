"""Tokenizer, text of drawn tokens, stop strings and chat templates.

tokenizer.py             text to token ids and back
tokenizer_config.py      special tokens by name and the sources of chat templates, from the model folder
stream_decoder.py        text of tokens that come one by one
stops.py                 stop strings in that text
conversation.py          what a chat template is given
chat_template.py         a conversation becomes text
template_process.py      the processes that chat templates run in, as the server sees them
template_worker.py       such a process
template_environment.py  the Jinja environment in it
template_wire.py         what the two say to each other
"""
