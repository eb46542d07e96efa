-- add_key.lua: adds an API key to an account, if the account has fewer than its limit.
--
-- Counts and adds in one step: of several requests that find room for one key, one adds it.
--
-- KEYS[1]  hash    the account's keys of this kind, full or scoped: key id -> record (JSON)
-- KEYS[2]  hash    its keys of the other kind, which count too
-- ARGV     key id, record, limit of keys of an account
--
-- Returns  1 when the account has the key; 0 when it already has the limit of keys

local keys, others = KEYS[1], KEYS[2]
local id, record, limit = ARGV[1], ARGV[2], tonumber(ARGV[3])

if redis.call('HEXISTS', keys, id) == 1 then return 1 end
if redis.call('HLEN', keys) + redis.call('HLEN', others) >= limit then return 0 end
return redis.call('HSET', keys, id, record)
