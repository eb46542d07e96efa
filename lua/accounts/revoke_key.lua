-- revoke_key.lua: removes an API key from an account, unless it is the account's only key and the caller keeps that.
--
-- Counts and removes in one step: two requests that revoke the last two keys at once must not leave the account
-- without any.
--
-- KEYS[1]  hash    the account's keys: key id -> record (JSON)
-- KEYS[2]  hash    times of their last use: key id -> ms
-- ARGV     key id, '1' to remove even the only key (otherwise '')
--
-- Returns  {'revoked' | 'last' | 'unknown', the record of the revoked key, or ''}

local keys, used = KEYS[1], KEYS[2]
local id, even_last = ARGV[1], ARGV[2] == '1'

local record = redis.call('HGET', keys, id)
if not record then return {'unknown', ''} end
if redis.call('HLEN', keys) == 1 and not even_last then return {'last', ''} end
redis.call('HDEL', keys, id)
redis.call('HDEL', used, id)
return {'revoked', record}
