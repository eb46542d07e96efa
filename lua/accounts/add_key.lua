-- add_key.lua: may an account have one more API key?
--
-- Counts and adds in one step: of several requests that find room for one key, one adds it.
--
-- KEYS[1]  hash    the account's keys: key id -> record (JSON)
-- ARGV     key id, record, keys an account may have
--
-- Returns  1 when the account has the key, also when it had it before and its record stays; 0 when there is no room

if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then return 1 end
if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then return 0 end
return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
