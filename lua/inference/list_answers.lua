-- list_answers.lua: lists the accounts that had an answer of a provider lately.
--
-- KEYS[1]  zset    the accounts with the two latest answers, by their time (ms): see record_answer.lua
-- ARGV     how long an answer counts (ms)
--
-- Returns  the accounts

local life = tonumber(ARGV[1])

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

return redis.call('ZRANGEBYSCORE', KEYS[1], string.format('(%.0f', now - life), now)
