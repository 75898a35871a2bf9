"""From a request's body to token ids: fields, chat template, images, tools, grammars, sampling parameters, continuation."""
