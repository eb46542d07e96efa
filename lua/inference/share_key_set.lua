-- share_key_set.lua: shares an app's public keys that a process has fetched, and releases its claim.
--
-- A slow process does not overwrite a newer copy that another process has shared in the meantime.
--
-- KEYS[1]  hash    the copy      KEYS[2]  string  the claim: see find_key_set.lua
-- ARGV     identity, age of the document (ms), how long it may be used (ms), digest, document; the last two are empty
--          if there is nothing to share
--
-- Returns  nothing

local identity, age, life, digest, document = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5]

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local at, left = now - age, life - age

local copy = redis.call('HMGET', KEYS[1], 'identity', 'at')
local newer = copy[1] == identity and tonumber(copy[2]) > at and tonumber(copy[2]) <= now
if document ~= '' and left > 0 and not newer then
  local fetched = string.format('%.0f', at)
  redis.call('HSET', KEYS[1], 'identity', identity, 'at', fetched, 'digest', digest, 'document', document)
  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', left))
end
if redis.call('GET', KEYS[2]) == identity then redis.call('DEL', KEYS[2]) end
