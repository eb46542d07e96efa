-- claim_delivery.lua: may this worker send this event now, what, and where to?
--
-- Another worker may have claimed an entry that waited long in a worker's memory. Only the consumer for which it is
-- pending may send it. Its idle time restarts here, so that no other worker claims it while it is being sent.
--
-- KEYS[1]  stream  the partition's events
-- KEYS[2]  string  the account's receiver, JSON
-- KEYS[3]  hash    the bodies of the account's events
-- KEYS[4]  string  the receiver's secret before the last rotation, for as long as it signs too
-- ARGV     group, consumer, entry, event id
--
-- Returns  {1, receiver or '', data or '', previous secret or '', which attempt this is, from 1} |
--          {0, '', '', '', 0}

local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])
if #pending == 0 then return {0, '', '', '', 0} end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'JUSTID')
return {1, redis.call('GET', KEYS[2]) or '', redis.call('HGET', KEYS[3], ARGV[4]) or '', redis.call('GET', KEYS[4]) or '',
        pending[1][4]}
