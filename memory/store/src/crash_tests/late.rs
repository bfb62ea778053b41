//! Writes to the disk by killed servers, and their notes.

use super::*;

/// A disk whose process is killed when it has requested a write, which the disk executes later:
/// `queue` has the first block's number and the bytes.
#[derive(Debug)]
struct Late<'a> {
    disk: FileDisk,
    queue: &'a File,
}

impl Disk for Late<'static> {
    fn blocks(&self) -> io::Result<u64> {
        self.disk.blocks()
    }

    fn read(&self, block: u32, out: &mut Block) -> io::Result<()> {
        self.disk.read(block, out)
    }

    fn write(&self, block: u32, blocks: &[Block]) -> io::Result<()> {
        if block == 0 {
            return self.disk.write(block, blocks);
        }
        self.queue.write_all_at(&block.to_le_bytes(), 0)?;
        for (number, block) in blocks.iter().enumerate() {
            self.queue.write_all_at(&block.0, 4 + number as u64 * 4096)?;
        }
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)?;
        Ok(())
    }
}

#[test]
fn writes_of_a_killed_server_may_reach_the_disk_late() {
    let _turn = turn();
    const LENGTH: usize = 4096;
    let store = Store::create(PAGES, options()).unwrap();
    let disk = memfd_create("disk", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&disk, 64 * 4096).unwrap();
    format_backing(&back(&disk), "disk", &store).unwrap();
    {
        let mut worker = store.worker().unwrap();
        for index in 0..60 {
            worker.put(index, 3, &bytes(index, 0, LENGTH)).unwrap();
        }
    }
    let fd: OwnedFd = store.fd().try_clone_to_owned().unwrap();
    drop(store);
    let mut queues = Vec::new();
    // Two servers are killed in this way, each with ten pages of its own, and a third one uses the
    // blocks that it finds free.
    for first in [0, 20] {
        let queue = File::from(memfd_create("queue", MemfdFlags::CLOEXEC).unwrap());
        let signal = killed(|| {
            let store = Store::attach(fd.as_fd(), options()).unwrap();
            let queue: &'static File = Box::leak(Box::new(queue.try_clone().unwrap()));
            store.set_backing(Box::new(Late { disk: back(&disk), queue }), "disk").unwrap();
            let mut worker = store.worker().unwrap();
            apply(&store, &mut worker, 0, Op::WriteBack(first, 10));
        });
        assert_eq!(signal, Some(9));
        queues.push(queue);
    }
    let store = Store::attach(fd.as_fd(), options()).unwrap();
    store.set_backing(Box::new(back(&disk)), "disk").unwrap();
    assert_eq!(store.lost_pages(), 0);
    let mut worker = store.worker().unwrap();
    // More pages than the killed servers had, and other pages first.
    for first in [40, 50, 0, 10] {
        apply(&store, &mut worker, 0, Op::WriteBack(first, 10));
    }
    assert_eq!(store.stats().bd_count, 40);
    for queue in queues {
        let mut first = [0; 4];
        queue.read_exact_at(&mut first, 0).unwrap();
        let len = queue.metadata().unwrap().len() - 4;
        assert_eq!(len, 10 * 4096);
        let mut late = vec![0; usize::try_from(len).unwrap()];
        queue.read_exact_at(&mut late, 4).unwrap();
        let at = u64::from(u32::from_le_bytes(first)) * 4096;
        let disk = File::from(disk.try_clone().unwrap());
        disk.write_all_at(&late, at).unwrap();
    }
    for index in 0..60 {
        assert_eq!(read(&worker, index), Some(bytes(index, 0, LENGTH)), "page {index}");
    }
    let stats = store.backing_stats().unwrap();
    assert_eq!((stats.doubtful, stats.free), (20, stats.blocks - 20 - 40));
}

#[test]
fn arbitrary_notes_of_killed_servers_only_reserve_blocks() {
    let _turn = turn();
    let store = Store::create(PAGES, options()).unwrap();
    let disk = memfd_create("disk", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&disk, 64 * 4096).unwrap();
    format_backing(&back(&disk), "disk", &store).unwrap();
    store.set_backing(Box::new(back(&disk)), "disk").unwrap();
    {
        let mut worker = store.worker().unwrap();
        for index in 0..20 {
            worker.put(index, 3, &bytes(index, 0, 4096)).unwrap();
        }
        apply(&store, &mut worker, 0, Op::WriteBack(0, 10));
    }
    let words = store.heap.map.superblock();
    // The header, a block beyond the end, none, too many, one twice, and those of existing pages.
    let mut noted = 0;
    for (first, len) in [
        (0_u64, 2_u64),
        (63, 1),
        (60, 900),
        (5, 0),
        (u64::from(u32::MAX), 3),
        (7, 1 << 31),
        (3, 4),
        (4, 2),
    ] {
        let at = superblock::note_run(words, &(1..2)).unwrap();
        words[at].store(first | len << 32, Ordering::Relaxed);
        noted += u32::from(first | len << 32 != 0);
    }
    let fd: OwnedFd = store.fd().try_clone_to_owned().unwrap();
    drop(store);
    let store = Store::attach(fd.as_fd(), options()).unwrap();
    store.take_backing(Box::new(back(&disk)), "disk").unwrap();
    store.retry_backing().unwrap();
    let mut worker = store.worker().unwrap();
    // Blocks 1, 3 to 6, 60 to 63; pages lie in 1 to 10.
    let stats = store.backing_stats().unwrap();
    assert_eq!((stats.blocks, stats.doubtful, stats.free), (63, 9, 63 - 10 - 4));
    for index in 0..20 {
        assert_eq!(read(&worker, index), Some(bytes(index, 0, 4096)), "page {index}");
    }
    // A discarded page in a barred block releases it, but the block does not become free.
    worker.discard(0..10);
    assert_eq!(store.backing_stats().unwrap().free, 63 - 9);
    // Without a free field in the superblock nothing is written.
    let words = store.heap.map.superblock();
    let full = loop {
        match superblock::note_run(words, &(20..21)) {
            Ok(_) => noted += 1,
            Err(full) => break full,
        }
    };
    assert_eq!(full, noted);
    let mut batch = Batch::new(16);
    let mut out = [0; MAX_OBJECT];
    let Ok(Page::Object { tag, len }) = worker.look(12, &mut out) else { panic!("page 12") };
    assert_eq!(batch.add(&Seen { index: 12, tag, bytes: &out[..len] }), Added::Yes);
    let refused = worker.write_back(&mut batch).unwrap_err().to_string();
    assert_eq!(refused, format!("{full} servers were killed while they wrote to it"));
    assert_eq!(store.backing_stats().unwrap().free, 63 - 9);
    assert_eq!(read(&worker, 12), Some(bytes(12, 0, 4096)));
}
