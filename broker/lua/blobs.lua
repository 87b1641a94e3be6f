-- Blobs (broker/blobs.py): a hash by name, and their bytes in all among the scalars.

function calls.PutBlob()
  local before = redis_at('HSTRLEN', 'blobs', args.name)
  local size = number('blob_bytes', 0) + #ARGV[payload] - before
  if size > args.max_bytes then
    local text = 'blob %s would make %d bytes of blobs, over broker.max_blob_bytes = %d'
    return refused(string.format(text, args.name, size, args.max_bytes))
  end
  redis_at('HSET', 'blobs', args.name, ARGV[payload])
  put('blob_bytes', string.format('%d', size))
  return ok(false)
end

function calls.GetBlob()
  local data = redis_at('HGET', 'blobs', args.name)
  if data then
    return ok(true, data)
  end
  return ok(false)
end

function calls.SweepBlobs()
  local count, size = 0, number('blob_bytes', 0)
  for _, name in ipairs(redis_at('HKEYS', 'blobs')) do
    local kept = false
    for _, prefix in ipairs(args.keep) do
      kept = kept or string.sub(name, 1, #prefix) == prefix
    end
    if not kept then
      size = size - redis_at('HSTRLEN', 'blobs', name)
      redis_at('HDEL', 'blobs', name)
      count = count + 1
    end
  end
  put('blob_bytes', string.format('%d', size))
  return ok(count)
end
