"""The tokenizer, the text of drawn tokens, stop strings and chat templates.

tokenizer.py             text to token ids and back
tokenizer_config.py      special tokens by name and the sources of chat templates, from the model folder
growth.py                bounds what the parts of a tokenizer can make of a text
control_tokens.py        decides which tokens text of others must never become, and finds their text in it
drawn_text.py            text of tokens that are drawn one by one, and stop strings in it
chat_template.py         renders a conversation to text
message_forms.py         finds which forms of messages a template takes, and brings messages into them
stand_ins.py             renders one in which the text of control tokens stays text
template_process.py      starts the processes that run chat templates, and asks them
template_worker.py       the program of such a process
template_environment.py  its Jinja environment
template_wire.py         the messages between it and the server
"""
