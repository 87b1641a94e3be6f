-- Part 4: notices. Who waits has subscribed to the channel of its kind; a notice only ends a pause, it says nothing.
-- Leases are waited for by many: "waiters" lists the channels of those who do, and a notice goes to as many of them as
-- there are prompts to lease and who may have one.

local kinds = { 'news', 'batch', 'offers', 'answers' }

local function wake_all()
  for _, kind in ipairs(kinds) do
    woken[kind] = true
  end
  woken.every_lease = true
end

-- A waiter is "<incarnation> <policy version> <channel>", by the time since which it waits.
local function wait_for_lease()
  local waiter = table.concat({ args.incarnation, args.policy_version, args.channel }, ' ')
  redis_at('ZADD', 'waiters', 'NX', now, waiter)
end

-- 'yes', 'no', or 'never' for a version that is too old.
local function may_lease(incarnation, policy_version)
  local evaluates = policy_version == number('round', -1) and redis_at('ZCARD', 'eval:queue') > 0
  local trains = redis_at('ZCARD', 'train:queue') > 0 and admitted(policy_version)
  if incarnation ~= number('incarnation', -1) or policy_version < oldest_admitted() then
    return evaluates and 'yes' or 'never'
  end
  return (evaluates or trains) and 'yes' or 'no'
end

local function wake_lessees()
  local room = math.max(0, window() - outstanding())
  local prompts = math.min(room, redis_at('ZCARD', 'train:queue')) + redis_at('ZCARD', 'eval:queue')
  local verdicts = {}
  for _, waiter in ipairs(redis_at('ZRANGE', 'waiters', 0, woken.every_lease and -1 or 255)) do
    if prompts <= 0 and not woken.every_lease then
      return
    end
    local incarnation, version, channel = string.match(waiter, '^(%S+) (%S+) (.+)$')
    local class = incarnation .. ' ' .. version
    verdicts[class] = verdicts[class] or may_lease(tonumber(incarnation), tonumber(version))
    if woken.every_lease or verdicts[class] == 'yes' then
      redis_at('ZREM', 'waiters', waiter)
      prompts = prompts - redis.call('PUBLISH', key(channel), '') -- none for one who is gone
    elseif verdicts[class] == 'never' then
      redis_at('ZREM', 'waiters', waiter)
    end
  end
end

local function notify()
  for _, kind in ipairs(kinds) do
    if woken[kind] then
      redis.call('PUBLISH', key(kind), '')
    end
  end
  if is_open() and (woken.lease or woken.every_lease) and redis_at('EXISTS', 'waiters') == 1 then
    wake_lessees()
  end
end
