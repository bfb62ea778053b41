use super::*;
use clap::Parser;
use device::Device;
use store::Store;

#[derive(clap::Parser)]
struct Serve {
    #[command(flatten)]
    args: ServeArgs,
}

/// The arguments `words` of a device of 1 GiB.
pub(in super::super) fn args(words: &str) -> &'static ServeArgs {
    let words = format!("serve --size 1G {words}");
    let Serve { args } = Serve::try_parse_from(words.split_whitespace()).unwrap();
    Box::leak(Box::new(args))
}

/// The plan of `words` by the kernel's NBD client, on a machine with this memory.
fn within(host: u64, cgroup: Option<u64>, words: &str) -> Plan<'static> {
    let args = args(&format!("--nbd unix:/x {words}"));
    Plan::within(Memory::of(host, cgroup), 4, args, None).unwrap()
}

#[test]
fn swap_without_a_limit_reserves_an_eighth_of_memory_for_the_host() {
    let options = |words: &str| within(16 << 30, None, words).store_options();
    let swap = options("--swap");
    assert_eq!((swap.mem_limit, swap.whole_part, swap.reserve), (14 << 30, 8, 512 << 20));
    // Also with a backing device: it may be full.
    let backed = Some("[policy]\nbacking_dev = \"/x\"\n");
    let backed = Plan::new(args("--nbd unix:/x --swap"), backed).unwrap();
    assert_eq!(backed.store_options().whole_part, 8);
    assert_eq!(options("--swap --mem-limit 3G").mem_limit, 3 << 30);
    assert_eq!(options("--swap --mem-limit 0").mem_limit, 0);
}

#[test]
fn a_disk_without_a_limit_gets_the_limit_of_its_cgroup() {
    let options = |words: &str, cgroup| within(16 << 30, cgroup, words).store_options();
    let free = options("", None);
    assert_eq!((free.mem_limit, free.whole_part, free.reserve), (0, 0, 64 << 20));
    let limited = options("", Some(48 << 20));
    assert_eq!((limited.mem_limit, limited.reserve), (24 << 20, 3 << 20));
    assert_eq!(options("", Some(128 << 20)).mem_limit, 104 << 20);
    assert_eq!(options("", Some(8 << 30)).mem_limit, 7 << 30);
    let told = options("--mem-limit 1G --reserve 9M", Some(48 << 20));
    assert_eq!((told.mem_limit, told.reserve), (1 << 30, 9 << 20));
}

/// Regression: in a cgroup the limit was the cgroup's, but reserve and buffers were the host's.
/// With `MemoryMax=1G` on a host of 16 GiB server after server was killed.
#[test]
fn a_swap_device_takes_all_its_defaults_from_the_lesser_of_host_and_cgroup() {
    let buffers = |plan: &Plan<'_>| {
        let ublk::Geometry { queues, depth, max_io, .. } = plan.ublk_options().geometry;
        u64::from(queues) * u64::from(depth) * u64::from(max_io)
    };
    for cgroup in [64 << 20, 256 << 20, 1 << 30, 4 << 30] {
        let swap = within(16 << 30, Some(cgroup), "--swap");
        let options = swap.store_options();
        let beside = buffers(&swap) + swap.heap(None) as u64;
        // The reserve is a part of the store.
        assert!(options.mem_limit + beside < cgroup, "{cgroup}: {options:?} and {beside}");
        assert!(options.reserve <= (cgroup / 16).max(8 << 20), "{cgroup}: {options:?}");
        // The same as on a host that has no more, except for a limit of a small cgroup.
        let alone = within(cgroup, None, "--swap");
        assert_eq!(options.reserve, alone.store_options().reserve);
        assert_eq!(buffers(&swap), buffers(&alone));
        assert_eq!((swap.workers(), swap.policy), (alone.workers(), alone.policy));
    }
    // A limit above the host's memory is none.
    let swap = within(1 << 30, Some(4 << 30), "--swap").store_options();
    assert_eq!((swap.mem_limit, swap.reserve), (7 << 27, 64 << 20));
}

/// The test `writeback_heap` of crate `policy` measures what writeback takes.
#[test]
fn a_standby_server_has_the_memory_for_a_batch_of_the_chosen_size() {
    let heap = |batch: u32| {
        let text = format!("[policy]\nbacking_dev = \"/x\"\nwriteback_batch_size = {batch}\n");
        let plan = Plan::on(4, args("--ublk --swap"), Some(&text)).unwrap();
        let writeback = policy::writeback_memory(&plan.policy);
        (plan.heap(Some(0)), writeback)
    };
    let (small, large) = (heap(1), heap(1024));
    assert!(large.1 - small.1 > 5 << 20);
    assert_eq!(large.0 - small.0, large.1 - small.1);
}

#[test]
fn a_standby_server_has_the_memory_for_dictionaries_of_its_level() {
    for level in [-5, 1, 3, 9, 19] {
        let options = store::Options { reserve: 0, ..store::Options::default() };
        let store = Store::create(64, options).unwrap();
        let settings = Settings::new(codec::Codec::Zstd, Some(level)).unwrap();
        let options =
            DeviceOptions { settings, workers: 0, dictionaries: true, ..Default::default() };
        let device = Device::new(&store, &options).unwrap();
        let tables = device.dictionaries().memory();
        let (one, five) = (dictionary_heap(level, 1), dictionary_heap(level, 5));
        assert_eq!(one, tables + Dictionary::context_memory(level), "{level}");
        assert_eq!(five - one, 4 * Dictionary::context_memory(level), "{level}");
    }
    assert!(dictionary_heap(3, 4) > dictionary_heap(1, 4));
}
