-- hold_key.lua: takes, renews or ends the hold of a key. One process at a time holds it, until it no longer renews it.
--
-- A hold may need a location, such as the data folder with the apps: as long as the location is remembered, nobody who
-- is at another one gets the hold.
--
-- KEYS[1]  string  who holds it
-- KEYS[2]  string  optional: the location
-- ARGV     who asks, milliseconds that the hold lasts (0 ends it); with KEYS[2] also the caller's location ('' for any:
--          then none is remembered), seconds for which it is remembered
--
-- Returns  who holds it now; '' for nobody, which is also so if the caller is at another location

local key, location = KEYS[1], KEYS[2]
local asking, lifetime, own_location, kept = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]

local holder = redis.call('GET', key)
if holder and holder ~= asking then return holder end
if lifetime == 0 then
  redis.call('DEL', key)
  return ''
end
if location and own_location == '' then
  redis.call('DEL', location)
elseif location then
  if (redis.call('GET', location) or own_location) ~= own_location then return '' end
  redis.call('SET', location, own_location, 'EX', kept)
end
redis.call('SET', key, asking, 'PX', lifetime)
return asking
