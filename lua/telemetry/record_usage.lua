-- record_usage.lua: adds the counts of a gateway process for one account to its hour and day, and logs its requests.
--
-- Everything is written in one step, with its expiry. A caller without a reply does not retry: after a fault, counts may
-- be missing, but nothing is counted twice.
--
-- A hash has at most FIELDS names. Beyond that, further apps are counted together as '*', so that sums stay correct.
--
-- KEYS[1]  hash  the account's hour: '<app>/<model>/<count>' -> number
-- KEYS[2]  hash  its day, likewise
-- KEYS[3]  hash  its day by provider: '<provider>/<model>/<count>' -> number
-- KEYS[4]  zset  its requests (JSON), scored by their arrival, milliseconds
-- ARGV     number of requests, number of increments by provider, arrival and JSON of each request, names and increments
--          by provider, then those by app
--
-- Returns  the number of increments by app

local FIELDS = 1000
local REQUESTS = 1000
local PERIOD_SECONDS = { 1209600, 34560000 }  -- an hour is kept for 14 days, a day for 400
local REQUESTS_SECONDS = 2592000

local requests, by_provider = tonumber(ARGV[1]), tonumber(ARGV[2])
local first_provider = 2 * requests + 3
local first_name = first_provider + 2 * by_provider
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
if by_provider > 0 then
  for n = first_provider, first_name - 1, 2 do redis.call('HINCRBY', KEYS[3], ARGV[n], ARGV[n + 1]) end
  redis.call('EXPIRE', KEYS[3], PERIOD_SECONDS[2])
end
if requests > 0 then
  for n = 3, first_provider - 1, 2 do redis.call('ZADD', KEYS[4], ARGV[n], ARGV[n + 1]) end
  redis.call('ZREMRANGEBYRANK', KEYS[4], 0, -REQUESTS - 1)
  redis.call('EXPIRE', KEYS[4], REQUESTS_SECONDS)
end
return (#ARGV - first_name + 1) / 2
