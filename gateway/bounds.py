"""Limits the length and size of values from clients. Each field of a request's body has one of these types.

The body as a whole is also limited, but a field of a megabyte would be read, compared and listed again and again.
"""

from typing import Annotated

from msgspec import Meta

Url = Annotated[str, Meta(max_length=2_048)]
Host = Annotated[str, Meta(max_length=254)]  # including a final dot
Id = Annotated[str, Meta(max_length=128)]  # of an account, an app, a deploy, a key …
Credential = Annotated[str, Meta(max_length=256)]  # an API key, an operator's token
Claim = Annotated[str, Meta(max_length=200)]  # the path of a claim or of a field
Issuer = Annotated[str, Meta(max_length=1_024)]
Audience = Annotated[str, Meta(max_length=200)]
Audiences = Annotated[list[Audience], Meta(max_length=20)]
SigningSecret = Annotated[str, Meta(max_length=1_024)]
Sealed = Annotated[str, Meta(max_length=8_192)]  # an encrypted secret
UserToken = Annotated[str, Meta(min_length=1, max_length=16_384)]  # twice as long as one that is accepted
Command = Annotated[str, Meta(max_length=8_192)]
Folder = Annotated[str, Meta(max_length=1_024)]
Branch = Annotated[str, Meta(max_length=250)]
Text = Annotated[str, Meta(max_length=1_024)]  # a reason, for people
Euro = Annotated[str, Meta(max_length=32)]
Rate = Annotated[int, Meta(ge=0, le=1_000_000)]  # requests per 60 seconds; each is an entry of a list in Redis
ExitCode = Annotated[int, Meta(ge=-(2**31), le=2**32 - 1)]
