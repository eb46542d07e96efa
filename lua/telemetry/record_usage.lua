-- record_usage.lua: adds the counts of a gateway process for one account to its hour and day, and logs its requests.
--
-- Everything is written in one step, with its expiry. A caller without a reply does not retry: after a fault, counts may
-- be missing, but nothing is counted twice.
--
-- A hash has at most FIELDS names. Beyond that, further apps are counted together as '*', so that sums stay correct.
--
-- KEYS[1]  hash  the account's hour: '<app>/<model>/<count>' -> number
-- KEYS[2]  hash  its day, likewise
-- KEYS[3]  zset  its requests (JSON), scored by their arrival, milliseconds
-- ARGV     number of requests, arrival and JSON of each, then names and increments
--
-- Returns  the number of increments for each hash

local FIELDS = 1000
local REQUESTS = 1000
local PERIOD_SECONDS = { 1209600, 34560000 }  -- an hour is kept for 14 days, a day for 400
local REQUESTS_SECONDS = 2592000

local requests = tonumber(ARGV[1])
local first_name = 2 * requests + 2
for k, seconds in ipairs(PERIOD_SECONDS) do
  for n = first_name, #ARGV, 2 do
    local name, increment = ARGV[n], ARGV[n + 1]
    if redis.call('HLEN', KEYS[k]) >= FIELDS and redis.call('HEXISTS', KEYS[k], name) == 0 then
      name = string.gsub(name, '^[^/]*', '*', 1)
    end
    redis.call('HINCRBY', KEYS[k], name, increment)
  end
  redis.call('EXPIRE', KEYS[k], seconds)
end
if requests > 0 then
  for n = 2, first_name - 1, 2 do redis.call('ZADD', KEYS[3], ARGV[n], ARGV[n + 1]) end
  redis.call('ZREMRANGEBYRANK', KEYS[3], 0, -REQUESTS - 1)
  redis.call('EXPIRE', KEYS[3], REQUESTS_SECONDS)
end
return (#ARGV - first_name + 1) / 2
