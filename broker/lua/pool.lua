-- Part 2: prompts that wait for a lease or are leased (broker/pool.py), in the pools "train" and "eval".

local function queue(pool, item)
  redis_at('ZADD', pool .. ':queue', position(item), item)
  woken.lease = true
end

local function forget(pool, item)
  redis_at('ZREM', pool .. ':queue', item)
  redis_at('HDEL', pool .. ':prompts', item)
  redis_at('HDEL', pool .. ':failed', item)
end

local function grant_of(pool, lease_id)
  local packed = redis_at('HGET', pool .. ':grants', lease_id)
  return packed and cmsgpack.unpack(packed)
end

local function drop_grant(pool, lease_id)
  redis_at('HDEL', pool .. ':grants', lease_id)
  redis_at('ZREM', pool .. ':ends', lease_id)
end

local function grant(pool)
  local item = redis_at('ZPOPMIN', pool .. ':queue')[1]
  local lease_id = string.sub(scalars.token, 1, 8) .. '.' .. add('serial', 1)
  local attempt = tonumber(redis_at('HGET', pool .. ':failed', item) or 0) + 1
  local entry = {
    item = item,
    member = args.member_id,
    version = args.policy_version,
    incarnation = args.incarnation,
  }
  redis_at('HSET', pool .. ':grants', lease_id, cmsgpack.pack(entry))
  redis_at('ZADD', pool .. ':ends', now + number('lease_timeout_s'), lease_id)
  return { lease_id, attempt, item }, redis_at('HGET', pool .. ':prompts', item)
end

local function renew(pool, lease_id, member_id)
  local entry = grant_of(pool, lease_id)
  if entry and entry.member == member_id then
    redis_at('ZADD', pool .. ':ends', 'XX', 'GT', now + number('lease_timeout_s'), lease_id)
  end
end

-- A prompt that is given up. Of very many, the oldest are only counted (DEAD_KEPT of broker/items.py).
local function bury(item, attempts, error)
  local reason = tally(error)
  redis_at('HSET', 'ended', item, cmsgpack.pack({ reason = reason, version = false }))
  local grave = { attempts = attempts, error = error, reason = reason }
  redis_at('HSET', 'graves', item, cmsgpack.pack(grave))
  redis_at('HSET', 'graves:prompts', item, redis_at('HGET', 'train:prompts', item))
  redis_at('ZADD', 'graves:order', add('deaths', 1), item)
  while redis_at('ZCARD', 'graves:order') > 1024 do
    local oldest = redis_at('ZPOPMIN', 'graves:order')[1]
    redis_at('HDEL', 'graves', oldest)
    redis_at('HDEL', 'graves:prompts', oldest)
  end
end

-- Queues the item of a failed attempt again; with an error the attempt counts, and the last one ends the item.
local function put_back(pool, item, error)
  local attempts = error ~= '' and redis_at('HINCRBY', pool .. ':failed', item, 1) or 0
  if attempts >= number('max_attempts') then
    if pool == 'train' then
      bury(item, attempts, error)
    end
    forget(pool, item)
  else
    queue(pool, item)
  end
end

-- Ends a lease unanswered, as put_back.
local function give_back(pool, lease_id, error)
  woken.lease = true
  local item = grant_of(pool, lease_id).item
  drop_grant(pool, lease_id)
  put_back(pool, item, error)
end

local function give_back_all(pool, member_id, error)
  each(pool .. ':grants', function(lease_id, entry)
    if entry.member == member_id then
      event(error ~= '' and 'failed' or 'released', 1)
      give_back(pool, lease_id, error)
    end
  end)
end

-- Members (broker/roster.py): "members" holds what they sent, "shown" what a revision is made for, "seen" when.
local function keep_gone(member_id, shown)
  redis_at('HSET', 'shown', member_id, cmsgpack.pack(shown))
  redis_at('ZADD', 'gone', add('departures', 1), member_id)
  while redis_at('ZCARD', 'gone') > 32 do
    local oldest = redis_at('ZPOPMIN', 'gone')[1]
    redis_at('HDEL', 'members', oldest)
    redis_at('HDEL', 'shown', oldest)
    redis_at('HDEL', 'replaced', oldest)
  end
end

local function expire_members()
  local timeout = number('member_timeout_s')
  local lost = redis_at('ZRANGEBYSCORE', 'seen', '-inf', now - timeout)
  table.sort(lost)
  for _, member_id in ipairs(lost) do
    local shown = cmsgpack.unpack(redis_at('HGET', 'shown', member_id))
    redis_at('ZREM', 'seen', member_id)
    shown.state = 'gone'
    if shown.error == '' then
      shown.error = string.format('no heartbeat for broker.member_timeout_s = %g', timeout)
    end
    keep_gone(member_id, shown)
    event('members_lost', 1)
    news()
  end
end

local function expire()
  if not is_open() then
    return
  end
  for _, pool in ipairs({ 'train', 'eval' }) do
    for _, lease_id in ipairs(redis_at('ZRANGEBYSCORE', pool .. ':ends', '-inf', now)) do
      event('expired', 1)
      local text = 'lease expired: no heartbeat for broker.lease_timeout_s = %g'
      give_back(pool, lease_id, string.format(text, number('lease_timeout_s')))
    end
  end
  expire_members()
end

local function forget_pool(pool)
  for _, name in ipairs({ 'prompts', 'queue', 'failed', 'grants', 'ends' }) do
    redis_at('DEL', pool .. ':' .. name)
  end
end

-- "wait" with the seconds until the next lease or member expires, which no notice will announce.
local function wait()
  local soonest = nil
  for name, extra in pairs({ ['train:ends'] = 0, ['eval:ends'] = 0, seen = number('member_timeout_s', 0) }) do
    local first = redis_at('ZRANGE', name, 0, 0, 'WITHSCORES')
    local due = first[2] and tonumber(first[2]) + extra - now
    if due and (not soonest or due < soonest) then
      soonest = due
    end
  end
  return { 'wait', soonest and string.format('%.6f', soonest) or '' }
end
