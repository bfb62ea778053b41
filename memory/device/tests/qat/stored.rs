//! Units of the device in the store: read by software, within a limit, and written back.

use super::*;

#[test]
fn software_reads_units_of_the_device_and_the_reverse() {
    let sim = Sim::turn();
    sim.script("instances 2");
    let store = Store::create(PART, Options::default()).unwrap();
    let device = device(&store, 0);
    let mut client = Client::new(&device, 0, 11);
    let mut object = Box::new([0; PAGE]);
    let worker = store.worker().unwrap();
    let qat = sim.start().unwrap();
    // In software, and the device decompresses.
    client.round();
    // Only the device answers, also where a busy machine's device is late.
    let options = EngineOptions {
        max_plain: PAGE,
        direction: Direction::Both,
        deadline: Duration::from_secs(60),
        share: false,
        ..EngineOptions::default()
    };
    let mut engine = Engine::new(Some(&qat), options);
    let mut by_device = 0;
    for page in 0..PART {
        let Ok(Page::Object { tag, len }) = worker.look(page, &mut object) else { continue };
        if tag != Codec::Zlib.to_wire() {
            continue;
        }
        let lease = engine.take(PAGE).unwrap();
        engine.source(&lease)[..len].copy_from_slice(&object[..len]);
        engine.submit(lease, len, qat::Op::Decompress { plain_len: PAGE }, page);
        while engine.in_flight() > 0 {
            engine.poll(|page, plain| {
                let plain = plain.unwrap();
                assert!(plain.bytes == &client.model[page as usize * PAGE..][..PAGE]);
                by_device += u64::from(plain.by == qat::By::Device);
            });
            engine.wait();
        }
    }
    assert!(by_device > 20, "{by_device}");
    drop(engine);
    // By the device, and an inflater that is not ours reads it.
    device.offload(&qat, &offload(1, Duration::from_secs(60))).unwrap();
    await_ready(&device, 1);
    client.round();
    let mut offloaded = 0;
    for page in 0..PART {
        let Ok(Page::Object { tag, len }) = worker.look(page, &mut object) else { continue };
        if tag != Codec::DeflateQz.to_wire() {
            continue;
        }
        offloaded += 1;
        let (stream, crc32) = object[..len].split_last_chunk::<4>().unwrap();
        let plain = sim::inflate(stream).unwrap();
        assert!(plain == client.model[page as usize * PAGE..][..PAGE], "page {page}");
        let mut crc = flate2::Crc::new();
        crc.update(&plain);
        assert_eq!(u32::from_le_bytes(*crc32), crc.sum());
    }
    assert!(offloaded > 20, "{offloaded}");
    // And so does a device that has no accelerator and another codec.
    let other =
        Device::new(&store, &DeviceOptions { workers: 1, ..DeviceOptions::default() }).unwrap();
    drop(std::mem::replace(&mut client.queue, other.queue().unwrap()));
    drop(device);
    client.check();
}

#[test]
fn a_limit_fails_writes_and_preserves_stored_pages() {
    let sim = Sim::turn();
    sim.script("instances 1");
    let limit = 6 << 20;
    let store = Store::create(8192, Options { mem_limit: limit, ..Options::default() }).unwrap();
    let device = device(&store, 1);
    let qat = sim.start().unwrap();
    device.offload(&qat, &offload(1, Duration::from_secs(60))).unwrap();
    await_ready(&device, 1);
    let mut client = Client::new(&device, 0, 13);
    client.round();
    let mut noise = vec![0; 1024 * PAGE];
    let mut random = Random(77);
    noise.chunks_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()));
    let mut results = Vec::new();
    for number in 0..4 {
        // SAFETY: `noise` lives until every request is over, and no code writes it meanwhile.
        let buffer = unsafe { Buffer::new(noise.as_mut_ptr(), noise.len()) };
        let page = 1024 * (number + 1);
        let request = Request { op: Op::Write, page, pages: 1024, buffer };
        assert_eq!(client.queue.submit(number, request), None);
    }
    client.wait(0, &mut results);
    assert_eq!(results.len(), 4);
    assert!(results.iter().any(|result| result.1 == Err(Errno::NoSpace)), "{results:?}");
    client.check();
    assert_eq!(total(&device).by_device, stats(&device).engines[0].delivered);
}

#[test]
fn units_of_the_device_are_written_back_read_and_written_again() {
    let sim = Sim::turn();
    sim.script("instances 1; latency 30");
    let store = Store::create(PART, Options { reserve: 0, ..Options::default() }).unwrap();
    let disk = Shelf::pausing(PART as usize, std::thread::yield_now);
    format_backing(&disk, "shelf", &store).unwrap();
    store.set_backing(disk.boxed(), "shelf").unwrap();
    let device = device(&store, 1);
    let qat = sim.start().unwrap();
    device.offload(&qat, &offload(1, Duration::from_secs(60))).unwrap();
    await_ready(&device, 1);
    let mut client = Client::new(&device, 0, 31);
    let mut worker = store.worker().unwrap();
    let (mut batch, mut object) = (Batch::new(8), Box::new([0; MAX_OBJECT]));
    for round in 0..6 {
        client.round();
        let (mut offloaded, mut index) = (0, 0);
        while index < PART {
            let added = match worker.look(index, &mut object).unwrap() {
                Page::Object { tag, len } => {
                    offloaded += u64::from(tag == Codec::DeflateQz.to_wire());
                    batch.add(&Seen { index, tag, bytes: &object[..len] })
                }
                _ => Added::Unfit,
            };
            index += u64::from(added != Added::Full);
            if added == Added::Full || index == PART {
                worker.write_back(&mut batch).unwrap();
            }
        }
        assert!(offloaded > 20, "{offloaded} in round {round}");
        assert!(store.stats().bd_count > offloaded / 2, "{}", store.stats().bd_count);
        // Small reads and the one of all, while nothing or something of it is in memory.
        client.check();
        let mut out = vec![0; client.model.len()];
        // SAFETY: `out` is left alone until the request is over.
        let buffer = unsafe { Buffer::new(out.as_mut_ptr(), out.len()) };
        let request = Request { op: Op::Read, page: 0, pages: PART as u32, buffer };
        let mut results: Vec<_> =
            client.queue.submit(1, request).map(|result| (1, result)).into_iter().collect();
        client.wait(0, &mut results);
        assert_eq!(results, [(1, Ok(()))]);
        assert!(out == client.model);
    }
    assert_eq!(device.stats().failed_reads, 0);
}
