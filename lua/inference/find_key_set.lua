-- find_key_set.lua: finds the shared copy of an app's public keys, or decides which process fetches them.
--
-- Otherwise all processes would fetch an app's keys at the moment when their copies become old.
--
-- KEYS[1]  hash    the copy: identity, at (ms, before the fetch), digest (of the backend's document), document (JSON)
-- KEYS[2]  string  the identity for which a process fetches
-- ARGV     identity: of the app, its account, its `auth`, and the address of its keys; the copy's maximum age (ms);
--          for how long that process alone fetches (ms)
--
-- Returns  'copy', 'fetch' if the caller has to fetch the keys, or 'wait' while another process fetches them; the time
--          (ms); and of a copy, its age (ms), digest and document

local identity, max_age, held_for = ARGV[1], tonumber(ARGV[2]), ARGV[3]

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local copy = redis.call('HMGET', KEYS[1], 'identity', 'at', 'digest', 'document')
local age = now - tonumber(copy[2] or 0)
if copy[1] == identity and age >= 0 and age <= max_age then return {'copy', now, age, copy[3], copy[4]} end
if redis.call('SET', KEYS[2], identity, 'NX', 'PX', held_for) then return {'fetch', now} end
return {redis.call('GET', KEYS[2]) == identity and 'wait' or 'fetch', now}
