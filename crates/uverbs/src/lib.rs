//! What the kernel is asked: device discovery, typed uverbs commands, handles.
