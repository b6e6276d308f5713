"""Tools of Ullage's own, which it offers to the model and answers itself; Anthropic calls such tools server tools.

https://docs.anthropic.com/en/docs/agents-and-tools/tool-use/overview
"""
