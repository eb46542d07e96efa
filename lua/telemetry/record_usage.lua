-- record_usage.lua: adds what a gateway process has counted of an account to its hour and its day, and logs its requests.
--
-- Everything is written in one step, with its expiry. A caller that gets no answer does not call again: after a fault the
-- figures may lack something, but they never count it twice.
--
-- A hash takes FIELDS names. Beyond them, further apps are counted together under '*', so that sums stay right.
--
-- KEYS[1]  hash  the account's hour: '<app>/<model>/<count>' -> number
-- KEYS[2]  hash  its day, likewise
-- KEYS[3]  list  its requests, JSON, the newest last
-- ARGV     how many requests follow, these requests, then names and increments
--
-- Returns  how many increments were added to each hash

local FIELDS = 1000
local REQUESTS = 1000
local SECONDS = { 1209600, 34560000 }  -- that an hour and a day are kept: 14 and 400 days
local REQUESTS_SECONDS = 2592000

local first = tonumber(ARGV[1]) + 2
for k, seconds in ipairs(SECONDS) do
  for n = first, #ARGV, 2 do
    local name = ARGV[n]
    if redis.call('HLEN', KEYS[k]) >= FIELDS and redis.call('HEXISTS', KEYS[k], name) == 0 then
      name = string.gsub(name, '^[^/]*', '*', 1)
    end
    redis.call('HINCRBY', KEYS[k], name, ARGV[n + 1])
  end
  redis.call('EXPIRE', KEYS[k], seconds)
end
if first > 2 then
  for n = 2, first - 1 do redis.call('RPUSH', KEYS[3], ARGV[n]) end
  redis.call('LTRIM', KEYS[3], -REQUESTS, -1)
  redis.call('EXPIRE', KEYS[3], REQUESTS_SECONDS)
end
return (#ARGV - first + 1) / 2
