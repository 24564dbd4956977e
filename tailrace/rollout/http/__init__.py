"""The generation service behind OpenAI's HTTP API.

asked    the body of a request, checked
text     the text of tokens as they come
answers  the JSON of answers and of chunks
app      the routes; limits, errors, clients that go away
server   the app at a port
"""
