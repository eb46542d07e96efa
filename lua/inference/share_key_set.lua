-- share_key_set.lua: a process that has fetched an app's public keys shares them, and gives its claim back.
--
-- A slow process shares nothing older than what another one has shared meanwhile.
--
-- KEYS[1]  hash    the copy      KEYS[2]  string  the claim: see find_key_set.lua
-- ARGV     1 identity, 2 age of the document (ms), 3 how long it may be used (ms), 4 digest, 5 document; the last two are
--          empty if there is nothing to share

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local at, left = now - tonumber(ARGV[2]), tonumber(ARGV[3]) - tonumber(ARGV[2])

local copy = redis.call('HMGET', KEYS[1], 'identity', 'at')
local newer = copy[1] == ARGV[1] and tonumber(copy[2]) > at and tonumber(copy[2]) <= now
if ARGV[5] ~= '' and left > 0 and not newer then
  redis.call('HSET', KEYS[1], 'identity', ARGV[1], 'at', string.format('%.0f', at), 'digest', ARGV[4], 'document', ARGV[5])
  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', left))
end
if redis.call('GET', KEYS[2]) == ARGV[1] then redis.call('DEL', KEYS[2]) end
