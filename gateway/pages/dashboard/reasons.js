// Why tokens are refused, in words: the values of `reason` in the API.

export const REASONS = {
  malformed: "not a usable JWT",
  algorithm: "its algorithm fits no key",
  "unknown-key": "the key set lacks its key",
  signature: "signed with another key",
  expired: "it has expired",
  "not-yet": "not valid yet",
  issuer: "another issuer",
  audience: "another audience",
  user: "no usable user id",
  "backend-status": "the backend answered with an error or refused it",
  "backend-unreachable": "the backend could not be reached",
  "keys-unreadable": "the key set could not be used",
};
