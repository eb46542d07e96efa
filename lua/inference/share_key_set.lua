-- share_key_set.lua: shares an app's public keys that a process has fetched, and lets others fetch again.
--
-- A slow process does not overwrite a newer copy that another process has shared in the meantime.
--
-- KEYS[1]  hash    the copy      KEYS[2]  string  who fetches: see find_key_set.lua
-- ARGV     identity, a time of Redis before the fetch (ms), how long the document may be used after it (ms), digest,
--          document; the last two are empty if there is nothing to share
--
-- Returns  nothing

local identity, at, life, digest, document = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5]

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local age = now - at

local copy = redis.call('HMGET', KEYS[1], 'identity', 'at')
local newer = copy[1] == identity and tonumber(copy[2]) > at and tonumber(copy[2]) <= now
if document ~= '' and age >= 0 and age < life and not newer then
  redis.call('HSET', KEYS[1], 'identity', identity, 'at', ARGV[2], 'digest', digest, 'document', document)
  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', life - age))
end
if redis.call('GET', KEYS[2]) == identity then redis.call('DEL', KEYS[2]) end
