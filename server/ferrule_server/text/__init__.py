"""The tokenizer, the text of drawn tokens, stop strings and chat templates.

tokenizer.py             text to token ids and back
tokenizer_config.py      special tokens by name and the sources of chat templates, from the model folder
stream_decoder.py        text of tokens that arrive one by one
stops.py                 stop strings in that text
conversation.py          the input of a chat template
chat_template.py         a conversation rendered to text
template_process.py      the processes that run chat templates, on the side of the server
template_worker.py       one such process
template_environment.py  its Jinja environment
template_wire.py         the messages between the two
"""
