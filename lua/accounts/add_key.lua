-- add_key.lua: adds an API key to an account, if the account has fewer than its limit.
--
-- Counts and adds in one step: of several requests that find room for one key, one adds it.
--
-- KEYS[1]  hash    the account's keys: key id -> record (JSON)
-- ARGV     key id, record, limit of keys of an account
--
-- Returns  1 when the account has the key; 0 when it already has the limit of keys

local keys = KEYS[1]
local id, record, limit = ARGV[1], ARGV[2], tonumber(ARGV[3])

if redis.call('HEXISTS', keys, id) == 1 then return 1 end
if redis.call('HLEN', keys) >= limit then return 0 end
return redis.call('HSET', keys, id, record)
