-- hold_engine.lua: takes, renews or ends the lease of the one engine that serves the apps: a host, or a cluster's worker.
--
-- Without shared storage, the apps are in one data folder. A host with another folder does not have them, so it gets no
-- lease as long as the folder is remembered.
--
-- KEYS[1]  string  who holds the lease, JSON
-- KEYS[2]  string  id of the data folder that holds the apps, if there is no shared storage
-- ARGV     who asks, JSON, milliseconds that the lease lasts (0 ends it), id of the caller's data folder ('' for shared
--          storage), seconds for which the folder is remembered
--
-- Returns  who holds the lease now; '' for nobody, which is also so if the apps are in another folder

local engine, apps_folder = KEYS[1], KEYS[2]
local asking, lifetime, folder, kept = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]

local holder = redis.call('GET', engine)
if holder and holder ~= asking then return holder end
if lifetime == 0 then
  redis.call('DEL', engine)
  return ''
end
if folder == '' then
  redis.call('DEL', apps_folder)
else
  if (redis.call('GET', apps_folder) or folder) ~= folder then return '' end
  redis.call('SET', apps_folder, folder, 'EX', kept)
end
redis.call('SET', engine, asking, 'PX', lifetime)
return asking
