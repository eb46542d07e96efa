-- record_answer.lua: records that an account had an answer of a provider.
--
-- Two accounts are kept: whichever account's requests fail, the other one's answer speaks against them. The time is
-- Redis's, so that processes whose clocks differ agree on the age of an answer.
-- After a switchover that set it back, an answer from the future would count for too long.
--
-- KEYS[1]  zset    the accounts with the two latest answers, by their time (ms)
-- ARGV     account; how long the answer counts (ms)
--
-- Returns  nothing

local account, life = ARGV[1], ARGV[2]

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

redis.call('ZREMRANGEBYSCORE', KEYS[1], string.format('(%.0f', now), '+inf')
redis.call('ZADD', KEYS[1], string.format('%.0f', now), account)
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -3)
redis.call('PEXPIRE', KEYS[1], life)
