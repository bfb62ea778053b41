use super::*;
use crate::auto::{Auto, AutoConfig};
use pages::Arena;
use pipeline::{Pool, PoolConfig, Popped, Results};
use session::FrameType;

/// As after the death of a device, or where other threads have all instances.
#[test]
fn a_chunk_that_no_device_does_costs_all_of_its_thread_s_time() {
    const LEN: usize = 64 << 10;
    const CHUNKS: usize = 200;
    let settings = Settings::new(Codec::DeflateQz, None).unwrap();
    let auto = Arc::new(Auto::new(&AutoConfig::default(), vec![settings], 1));
    let engine = Engine::new(None, EngineOptions::default());
    let mut context = Some(EncodeContext {
        encoder: Encoder::new(settings).unwrap(),
        histories: None,
        packed: vec![0; LEN].into_boxed_slice(),
        offload: Some(Offload::new(engine, CHUNKS_ON_DEVICE, LEN)),
        qpl: None,
    });
    let make = |_| context.take().expect("one thread");
    let pool = Pool::<EncodeJob>::new(PoolConfig::default(), make).unwrap();
    let results = Results::new(2);
    let arena = Arena::new(4, LEN).unwrap();
    let (counters, spare) = (Arc::<Counters>::default(), Arc::new(Ring::new(2)));
    let words = (0_u32..).flat_map(|word| format!("page {word} of the guest, ").into_bytes());
    let plain: Vec<u8> = words.take(LEN).collect();
    for _ in 0..CHUNKS {
        let (mut chunk, payload) = (arena.take().unwrap(), arena.take().unwrap());
        chunk[..LEN].copy_from_slice(&plain);
        let job = EncodeJob {
            header: Header::free(FrameType::Data, 0),
            chunk,
            len: LEN,
            checksum: 0,
            tokens: Vec::new(),
            page_size: 4096,
            pages: 16,
            payload,
            counters: Arc::clone(&counters),
            spare: Arc::clone(&spare),
            assigned: Some(auto.choose(&plain)),
        };
        assert!(pool.submit_wait(job, &results).is_ok());
        assert!(matches!(results.pop_until(None), Popped::Item(_)));
    }
    pool.join();
    let taken = pool.cpu_times()[0].as_nanos() as f64 / (CHUNKS * LEN) as f64;
    let classes = auto.report().last.classes;
    let mut candidates = classes.iter().flat_map(|class| &class.candidates);
    let seen = candidates.find(|one| one.observations > 0.0).expect("its chunks were seen");
    assert!(seen.cost_ns > taken / 3.0, "{} of {taken} ns a byte", seen.cost_ns);
}
