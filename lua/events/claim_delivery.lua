-- claim_delivery.lua: confirms that a worker may send an event now, and returns the receiver and the event's data.
--
-- Another worker may have claimed an entry that waited long in a worker's memory. Only the consumer for which the entry
-- is pending may send it. The entry's idle time restarts here, so that no other worker claims it during the delivery.
--
-- KEYS[1]  stream  the partition's events
-- KEYS[2]  string  the account's receiver, JSON
-- KEYS[3]  hash    the bodies of the account's events
-- KEYS[4]  string  the receiver's secret before the last rotation, while it still signs
-- KEYS[5]  zset    accounts that are being deleted: nothing is sent to their receivers
-- ARGV     group, consumer, entry, event id, account
--
-- Returns  {1, receiver or '', data or '', previous secret or '', number of this attempt, from 1} |
--          {0, '', '', '', 0}

local stream, receiver, bodies, previous_secret = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local deletions = KEYS[5]
local group, consumer, entry, event, account = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local pending = redis.call('XPENDING', stream, group, entry, entry, 1, consumer)
if #pending == 0 then return {0, '', '', '', 0} end
redis.call('XCLAIM', stream, group, consumer, 0, entry, 'JUSTID')
local address = not redis.call('ZSCORE', deletions, account) and redis.call('GET', receiver) or ''
return {1, address, redis.call('HGET', bodies, event) or '',
        redis.call('GET', previous_secret) or '', pending[1][4]}
