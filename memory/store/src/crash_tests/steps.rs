//! Servers that are killed at each step of each operation.

use super::*;

/// Bytes of all objects that entries name, also those of groups.
fn sum_of_objects(store: &Store) -> u64 {
    let map = &store.heap.map;
    let records = store.heap.groups.records(map).iter().flat_map(|record| record.pieces());
    let words = map.table().iter().chain(records).filter_map(|slot| slot.load().state());
    words
        .map(|state| match state {
            State::Object(object) => u64::from(object.len),
            _ => 0,
        })
        .sum()
}

#[test]
fn a_server_killed_at_any_step_leaves_a_consistent_store() {
    let _turn = turn();
    let (steps, doubtful) = killed_at_each_step(&prelude(), &script(), 0, |_, _| true);
    println!("killed at each of {steps} steps, at {doubtful} of them while blocks were written");
    // Before the write, and before it is noted to be over: each of the script's three.
    assert_eq!(doubtful, 6, "at {doubtful} steps blocks were being written");
    assert!(steps > 300, "the schedule has {steps} steps only: is it compiled in?");
}

/// The operations of a script that are done with a limit of this many bytes; the others are
/// refused.
fn done_with(script: &[Op], limit: u64) -> Vec<bool> {
    let store = Store::create(PAGES, limited(limit)).unwrap();
    let fd: OwnedFd = store.fd().try_clone_to_owned().unwrap();
    drop(store);
    let store = Store::attach(fd.as_fd(), limited(limit)).unwrap();
    let mut worker = store.worker().unwrap();
    let mut done = Vec::new();
    for (number, &op) in script.iter().enumerate() {
        done.push(apply(&store, &mut worker, number, op));
        assert!(store.stats().mem_used_total <= limit, "{op:?}");
    }
    done
}

#[test]
fn a_full_store_whose_server_is_killed_stays_within_its_limit() {
    let _turn = turn();
    let script = full_script();
    let limit = 36 * 4096;
    let done = done_with(&script, limit);
    let refused = done.iter().filter(|done| !**done).count();
    println!("{refused} of {} operations are refused", script.len());
    assert!(refused > 3 && refused < script.len() / 2, "{refused} of {} refused", script.len());
    // Each slab length uses the ready memory of the others.
    for op in [60, 100, 140, 0] {
        let wrote = |(number, op_of): (usize, &Op)| {
            matches!(*op_of, Op::Put(index, _) | Op::Modify(index, _) if index == op)
                && done[number]
        };
        assert!(script.iter().enumerate().any(wrote), "page {op} was never written");
    }
    let (steps, _) = killed_at_each_step(&[], &script, limit, |number, _| done[number]);
    println!("killed at each of {steps} steps");
    assert!(steps > 300, "the schedule has {steps} steps only");
}

/// Kills a server at each step of `script`, with a memory limit of this many bytes (0: none).
/// Returns the number of steps, and at how many of them blocks of the disk were barred. `done` says
/// which operations have an effect.
// Over 80 lines: one loop over all steps, and what must hold after each.
fn killed_at_each_step(
    prelude: &[Op],
    script: &[Op],
    limit: u64,
    done: impl Fn(usize, Op) -> bool,
) -> (i64, u64) {
    let effect = |held: &mut Held, number: usize| {
        if done(number, script[number]) {
            expect(held, number, script[number]);
        }
    };
    let (mut at, mut doubtful) = (0, 0);
    loop {
        at += 1;
        let store = Store::create(PAGES, limited(limit)).unwrap();
        let disk = memfd_create("disk", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&disk, 24 * 4096).unwrap();
        let back = || back(&disk);
        format_backing(&back(), "disk", &store).unwrap();
        let mut before = Held::new();
        {
            let mut worker = store.worker().unwrap();
            for (number, &op) in prelude.iter().enumerate() {
                apply(&store, &mut worker, 1000 + number, op);
                expect(&mut before, 1000 + number, op);
            }
        }
        // A killed reader leaves its pin.
        if !prelude.is_empty() {
            store.heap.map.table()[3].pin(true).expect("page 3 is an object");
        }
        let fd: OwnedFd = store.fd().try_clone_to_owned().unwrap();
        drop(store);
        let counted = File::from(memfd_create("done", MemfdFlags::CLOEXEC).unwrap());
        counted.write_all_at(&0_u64.to_le_bytes(), 0).unwrap();

        let signal = killed(|| {
            inject::arm(at);
            let store = Store::attach(fd.as_fd(), limited(limit)).unwrap();
            store.set_backing(Box::new(back()), "disk").unwrap();
            let mut worker = store.worker().unwrap();
            for (number, &op) in script.iter().enumerate() {
                assert_eq!(apply(&store, &mut worker, number, op), done(number, op), "{op:?}");
                counted.write_all_at(&(number as u64 + 1).to_le_bytes(), 0).unwrap();
            }
        });

        let mut count = [0; 8];
        counted.read_exact_at(&mut count, 0).unwrap();
        let count = usize::try_from(u64::from_le_bytes(count)).unwrap();
        (0..count).for_each(|number| effect(&mut before, number));
        let mut after = before.clone();
        if count < script.len() {
            effect(&mut after, count);
        }
        let store = Store::attach(fd.as_fd(), options()).unwrap();
        store.set_backing(Box::new(back()), "disk").unwrap();
        assert_eq!(store.generation(), 3, "the maker, the child and we");
        assert_eq!(store.lost_pages(), 0, "step {at}");
        let mut worker = store.worker().unwrap();
        for index in 0..PAGES {
            let held = read(&worker, index);
            assert!(
                held.as_ref() == before.get(&index) || held.as_ref() == after.get(&index),
                "step {at}, in operation {count}: page {index} holds {:?} bytes",
                held.map(|held| held.len())
            );
        }
        let stats = store.stats();
        assert_eq!(stats.mem_used_total, store.resident().unwrap(), "step {at}");
        assert!(limit == 0 || stats.mem_used_total <= limit, "step {at}: beyond the limit");
        let installs = |done: &[Op]| {
            let all = done.iter().filter_map(|op| match op {
                Op::Dictionary(len) => Some(*len),
                _ => None,
            });
            all.collect::<Vec<usize>>()
        };
        let (least, most) =
            (installs(&script[..count]), installs(&script[..(count + 1).min(script.len())]));
        let places = store.dictionaries();
        assert!(places == least.len() || places == most.len(), "step {at}: {places} dictionaries");
        for (place, len) in most[..places].iter().enumerate() {
            let mut out = [0; MAX_DICTIONARY];
            let found = store.dictionary(place, &mut out).expect("none is damaged");
            let number =
                script.iter().enumerate().filter(|(_, op)| matches!(op, Op::Dictionary(_)));
            let number = number.map(|(number, _)| number).nth(place).expect("it was installed");
            assert!(found.len == *len && out[..*len] == bytes(0, number, *len), "step {at}");
        }
        let with: u64 = store.dictionary_pages().iter().sum();
        let named = store.heap.map.table().iter().filter(|slot| {
            matches!(slot.load().state(), Some(State::Object(of)) if dictionary_of(of.tag).is_some())
        });
        assert_eq!(with, named.count() as u64, "step {at}");
        let sum: u64 = sum_of_objects(&store);
        assert_eq!(stats.compr_data_size, sum, "step {at}");
        // The store works: every page can be written, read and discarded.
        for index in 0..PAGES {
            worker.put(index, 5, &bytes(index, 77, 1100)).unwrap();
        }
        for index in 0..PAGES {
            assert_eq!(read(&worker, index), Some(bytes(index, 77, 1100)), "step {at}");
        }
        assert_eq!(store.stats().compr_data_size, PAGES * 1100);
        assert_eq!((store.stats().groups, store.stats().grouped_pages), (0, 0));
        let back = store.backing_stats().unwrap();
        assert_eq!(
            (store.stats().bd_count, back.free),
            (0, back.blocks - back.doubtful),
            "step {at}"
        );
        // Only a server killed while it wrote leaves blocks to which a write may be pending.
        assert!(back.doubtful <= 16, "step {at}: {} doubtful blocks", back.doubtful);
        let writing = matches!(script.get(count), Some(Op::WriteBack(..)));
        assert!(back.doubtful == 0 || writing, "step {at}, in operation {count}");
        doubtful += u64::from(back.doubtful > 0);
        worker.discard(0..PAGES);
        worker.rest();
        store.trim();
        assert_eq!(store.dictionary_pages(), [0; DICTIONARIES]);
        let fixed = store.heap.map.layout().fixed_pages() + 4 * places as u64;
        assert_eq!(store.stats().mem_used_total, fixed * 4096);
        assert_eq!(store.resident().unwrap(), store.stats().mem_used_total, "step {at}");
        if back.doubtful > 0 {
            // Also for the next server.
            drop((worker, store));
            let store = Store::attach(fd.as_fd(), options()).unwrap();
            store.take_backing(Box::new(self::back(&disk)), "disk").unwrap();
            assert_eq!(store.backing_stats().unwrap().doubtful, back.doubtful, "step {at}");
        }
        if signal.is_none() {
            assert_eq!(count, script.len());
            break;
        }
    }
    (at - 1, doubtful)
}
