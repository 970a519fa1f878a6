"""The server of `stoker ui`: a page over the verbs. It answers from runs' folders and from verbs that it starts."""
