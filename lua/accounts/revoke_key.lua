-- revoke_key.lua: an account's API key ends, unless it is the account's only one.
--
-- Counts and removes in one step: two requests that revoke the last two keys at once must not leave the account
-- without any.
--
-- KEYS[1]  hash    the account's keys: key id -> record (JSON)
-- KEYS[2]  hash    when they were last used: key id -> ms
-- ARGV     key id
--
-- Returns  {'revoked' | 'last' | 'unknown', the record of a key that was revoked, or ''}

local record = redis.call('HGET', KEYS[1], ARGV[1])
if not record then return {'unknown', ''} end
if redis.call('HLEN', KEYS[1]) == 1 then return {'last', ''} end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
return {'revoked', record}
