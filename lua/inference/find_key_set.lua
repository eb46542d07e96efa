-- find_key_set.lua: finds the shared copy of an app's public keys, or decides which process fetches them.
--
-- Without a claim, all processes would fetch the keys of an app in the moment in which their copies become old.
--
-- KEYS[1]  hash    the copy: identity, at (ms: when it was fetched), digest (of the backend's document), document (JSON)
-- KEYS[2]  string  the claim: the identity for which a process fetches
-- ARGV     1 identity: of the app, its account, its way to verify tokens, and the address of its keys; 2 the age that
--          the copy may have (ms), 3 how long a claim lasts (ms)
--
-- Returns  {'copy', its age (ms), digest, document}, {'fetch'}: the caller shall, or {'wait'}: another process does

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local copy = redis.call('HMGET', KEYS[1], 'identity', 'at', 'digest', 'document')
local age = now - tonumber(copy[2] or 0)
if copy[1] == ARGV[1] and age >= 0 and age <= tonumber(ARGV[2]) then return {'copy', age, copy[3], copy[4]} end
if redis.call('SET', KEYS[2], ARGV[1], 'NX', 'PX', ARGV[3]) then return {'fetch'} end
return {redis.call('GET', KEYS[2]) == ARGV[1] and 'wait' or 'fetch'}
