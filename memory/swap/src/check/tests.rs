//! The check on made-up trees: in one all items are met, and each change makes exactly one item
//! fail.

use std::os::unix::fs::symlink;

use super::process::Mappings;
use super::*;

const SERVER: u32 = 10;
const SUPERVISOR: u32 = 11;
const STANDBY: u32 = 12;
const DISK: &str = "/dev/ublkb3";
const FLUSHER: u64 = 0x8008_0000;
const ADDED: &str =
    "6,9,9,-;Adding 1020k swap on /dev/ublkb3.  Priority:100 extents:1 across:1020k SSDsc";

struct Tree {
    folder: tempfile::TempDir,
    log: Result<Vec<String>, String>,
}

fn stat(flags: u64, policy: u32) -> String {
    // 41 fields, the second with brackets in it.
    format!("77 (a) b (c)) S 1 77 77 0 -1 {flags} {}{policy} 0", "0 ".repeat(31))
}

impl Tree {
    /// Three processes, each with two threads, and a disk: all as it must be.
    fn whole() -> Self {
        let log = Ok(vec![ADDED.to_owned(), ADDED.replace("ublkb3", "ublkb31")]);
        let tree = Self { folder: tempfile::tempdir().unwrap(), log };
        for pid in [SERVER, SUPERVISOR, STANDBY] {
            let own = |file: &str| format!("proc/{pid}/{file}");
            tree.put(&own("oom_score_adj"), "-1000\n");
            tree.put(&own("cgroup"), "0::/machines/platen\n");
            tree.put(
                &own("limits"),
                "Limit Soft Hard Units\nMax core file size        1                    1      bytes\n\
                 Max locked memory         unlimited            unlimited            bytes\n",
            );
            tree.put(
                &own("smaps"),
                "7f00-7f01 rw-p 00000000 00:00 0      [heap]\nRss: 4 kB\nVmFlags: rd wr mr mw me lo ac\n",
            );
            tree.thread(pid, pid, "platen", 0x40 | FLUSHER, 0);
            tree.thread(pid, pid + 100, "store-keeper", 0x40 | FLUSHER, 2);
            tree.link(&own("ns/mnt"), "mnt:[2]");
        }
        tree.link("proc/1/ns/mnt", "mnt:[1]");
        tree.put(
            "proc/swaps",
            "Filename Type Size Used Priority\n/dev/ublkb3 partition 1020 8 100\n",
        );
        tree.put("proc/sys/kernel/core_pattern", "|/usr/lib/systemd/systemd-coredump %P\n");
        tree.put("proc/sys/vm/page-cluster", "0\n");
        tree.put("proc/sys/kernel/osrelease", "6.15.0-rc1\n");
        for (file, text) in [
            ("machines/platen/memory.swap.max", "0"),
            ("machines/platen/memory.max", "max"),
            ("machines/platen/memory.high", "max"),
            ("machines/memory.swap.max", "max"),
            ("machines/memory.max", "max"),
            ("machines/memory.high", "max"),
        ] {
            tree.put(&format!("sys/fs/cgroup/{file}"), &format!("{text}\n"));
        }
        for (file, text) in [
            ("discard_max_bytes", "4194304"),
            ("discard_granularity", "4096"),
            ("rotational", "0"),
            ("logical_block_size", "4096"),
            ("physical_block_size", "4096"),
            ("write_cache", "write through"),
            ("fua", "0"),
        ] {
            tree.put(&format!("sys/class/block/ublkb3/queue/{file}"), &format!("{text}\n"));
        }
        tree
    }

    fn thread(&self, pid: u32, thread: u32, name: &str, flags: u64, policy: u32) {
        self.put(&format!("proc/{pid}/task/{thread}/stat"), &stat(flags, policy));
        self.put(&format!("proc/{pid}/task/{thread}/comm"), &format!("{name}\n"));
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn link(&self, path: &str, to: &str) {
        let path = self.folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        symlink(to, path).unwrap();
    }

    fn remove(&self, path: &str) {
        fs::remove_file(self.folder.path().join(path)).unwrap();
    }

    fn check(&self) -> Vec<Item> {
        let eyes = Eyes {
            root: self.folder.path().to_owned(),
            flusher: Ok(FLUSHER),
            log: self.log.clone(),
        };
        eyes.check(&Subject {
            keeper: "store-keeper",
            pids: &[SERVER, SUPERVISOR, STANDBY],
            disk: Some(Path::new(DISK)),
            memory: Some(Memory { ready: 3 << 20, limit: 5 << 20 }),
        })
    }

    /// The only item that is not met says `why`.
    fn fails(&self, name: &str, why: &str) {
        let items = self.check();
        let not: Vec<_> = items.iter().filter(|item| item.state == State::NotMet).collect();
        assert!(not.len() == 1 && not[0].name == name, "{name}: {not:?}");
        assert!(not[0].found.contains(why), "{name} says {:?}, not {why:?}", not[0].found);
        let required = not[0].weight == Weight::Required;
        assert_eq!(all_required_met(&items), !required, "{name}");
    }
}

/// Items that no file shows.
const UNSEEN: [&str; 2] = ["no-allocation", "output-threads"];

#[test]
fn on_a_correct_host_every_visible_item_is_met() {
    let items = Tree::whole().check();
    for item in &items {
        let unseen = UNSEEN.contains(&item.name);
        let expected = if unseen { State::Unseen } else { State::Met };
        assert_eq!(item.state, expected, "{item}");
    }
    assert_eq!(items.len(), 17);
    let locked = items.iter().find(|item| item.name == "memory-locked").unwrap();
    assert_eq!(locked.found, "10 has 4 KiB locked, 11 has 4 KiB locked, 12 has 4 KiB locked");
    let keeper = items.iter().find(|item| item.name == "keeper").unwrap();
    assert!(keeper.found.ends_with("3072 KiB are ready, the limit is 5120 KiB"), "{keeper}");
}

/// The swapped-out pages of such a disk hang on one server more than elsewhere.
#[test]
fn a_ublk_driver_that_gives_up_disks_is_named_with_its_kernel() {
    let late = "may still work for a dead server";
    for (release, works_late) in
        [("6.7.0", true), ("6.12.95+deb13-amd64", true), ("6.14.11", true), ("6.1.0-38", false)]
    {
        let tree = Tree::whole();
        tree.put("proc/sys/kernel/osrelease", &format!("{release}\n"));
        tree.fails("ublk-driver", &format!("Linux {release}: "));
        tree.fails("ublk-driver", "boot Linux 6.15 or later");
        let items = tree.check();
        let said = &items.iter().find(|item| item.name == "ublk-driver").unwrap().found;
        assert_eq!(said.contains(late), works_late, "{said}");
    }
    let tree = Tree::whole();
    for release in ["6.15.0", "6.18.44-cloud", "7.0.1"] {
        tree.put("proc/sys/kernel/osrelease", release);
        assert!(tree.check().iter().all(|item| item.state != State::NotMet), "{release}");
    }
    tree.put("proc/sys/kernel/osrelease", "unknown");
    tree.fails("ublk-driver", "its version \"unknown\"");
    let eyes = Eyes { root: tree.folder.path().into(), flusher: Ok(FLUSHER), log: Ok(vec![]) };
    assert!(eyes.ublk_driver(Path::new("/dev/nbd3")).is_none());
}

#[test]
fn each_process_is_looked_at() {
    for pid in [SERVER, SUPERVISOR, STANDBY] {
        let own = |file: &str| format!("proc/{pid}/{file}");
        let tree = Tree::whole();
        tree.thread(pid, pid + 200, "late", 0x40, 0);
        tree.fails("io-flusher", &format!("threads {} of 7", pid + 200));

        let tree = Tree::whole();
        tree.put(&own("smaps"), "7f00-7f01 rw-p 00000000 00:00 0 [heap]\nVmFlags: rd wr mr\n");
        tree.fails("memory-locked", &format!("process {pid}: 1 mappings"));

        let tree = Tree::whole();
        tree.put(&own("limits"), "Max core file size 1 1 bytes\nMax locked memory 65536 65536\n");
        tree.fails("lock-limit", &format!("process {pid} may lock 65536 bytes"));

        let tree = Tree::whole();
        tree.put(&own("oom_score_adj"), "-999\n");
        tree.fails("oom-score", &format!("process {pid} has oom_score_adj -999"));

        let tree = Tree::whole();
        tree.link(&own("ns/mnt"), "mnt:[1]");
        tree.fails("mount-namespace", &format!("process {pid} has the mounts of everybody"));

        let tree = Tree::whole();
        tree.put(&own("cgroup"), "0::/machines\n");
        tree.fails("cgroup", "cgroup /machines: memory.swap.max should be 0");
    }
}

#[test]
fn a_core_limit_of_0_stops_core_files_and_not_core_pipes() {
    let limits = |size: &str| {
        format!("Max core file size {size} {size} bytes\nMax locked memory unlimited unlimited\n")
    };
    let tree = Tree::whole();
    tree.put("proc/12/limits", &limits("0"));
    tree.fails("no-core-dump", "process 12 has a limit of 0");
    tree.put("proc/sys/kernel/core_pattern", "core\n");
    let all = tree.check();
    assert!(all.iter().all(|item| item.state != State::NotMet), "{all:?}");
    for more in ["4096", "unlimited"] {
        tree.put("proc/11/limits", &limits(more));
        tree.fails("no-core-dump", &format!("process 11 may dump {more} bytes"));
    }
    // If the core goes to a socket, no limit is known to help.
    let tree = Tree::whole();
    tree.put("proc/sys/kernel/core_pattern", "@/run/cores\n");
    let all = tree.check();
    let item = all.iter().find(|item| item.name == "no-core-dump").unwrap();
    assert_eq!(item.state, State::Unseen, "{item}");
}

#[test]
fn a_limit_or_disabled_swap_of_a_parent_cgroup_counts() {
    for (file, what) in [("memory.max", "1048576"), ("memory.high", "2097152")] {
        for (group, name) in [("machines", "/machines"), ("machines/platen", "/machines/platen")] {
            let tree = Tree::whole();
            tree.put(&format!("sys/fs/cgroup/{group}/{file}"), what);
            tree.fails(
                "cgroup",
                &format!("cgroup {name}, in which process 10 is, has {file} {what}"),
            );
        }
    }
    let tree = Tree::whole();
    tree.put("sys/fs/cgroup/machines/platen/memory.swap.max", "4096");
    tree.fails("cgroup", "memory.swap.max should be 0");
    tree.put("sys/fs/cgroup/machines/memory.swap.max", "0");
    let all = tree.check();
    assert!(all.iter().all(|item| item.state != State::NotMet), "{all:?}");

    let tree = Tree::whole();
    tree.remove("sys/fs/cgroup/machines/platen/memory.swap.max");
    tree.fails("cgroup", "or has no memory controller");
    tree.put("proc/10/cgroup", "4:memory:/x\n");
    tree.fails("cgroup", "no unified cgroup hierarchy");
}

#[test]
fn the_keeper_belongs_to_the_server_and_has_real_time_priority() {
    let tree = Tree::whole();
    tree.thread(SERVER, SERVER + 100, "store-keeper", 0x40 | FLUSHER, 0);
    tree.fails("keeper", "not of real time");
    tree.thread(SERVER, SERVER + 100, "policy", 0x40 | FLUSHER, 2);
    tree.fails("keeper", "process 10 has no thread store-keeper");
}

#[test]
fn swap_that_is_off_is_not_met() {
    let tree = Tree::whole();
    tree.put("proc/swaps", "Filename Type Size Used Priority\n/dev/ublkb31 partition 1020 8 100\n");
    tree.fails("swap-on", "/dev/ublkb3 is not in /proc/swaps");
}

#[test]
fn discards_need_the_disk_and_swapon() {
    for (file, value) in [("discard_max_bytes", "0"), ("discard_granularity", "65536")] {
        let tree = Tree::whole();
        tree.put(&format!("sys/class/block/ublkb3/queue/{file}"), value);
        tree.fails("discard", "freed swap stays stored");
    }
    // The last log line counts: one without flags, and one with a single discard at the beginning.
    for flags in ["", "SS", "SSD", "SSDs"] {
        let mut tree = Tree::whole();
        tree.log.as_mut().unwrap().push(ADDED.replace("SSDsc", flags));
        tree.fails("discard", "swapon has not asked for discards");
        tree.log.as_mut().unwrap().push(ADDED.to_owned());
        assert!(tree.check().iter().all(|item| item.state != State::NotMet));
    }
    // Each area of the disk counts.
    let mut tree = Tree::whole();
    tree.put(
        "proc/swaps",
        "Filename Type Size Used Priority\n/dev/ublkb3p1 partition 1020 8 100\n\
         /dev/ublkb3p2 partition 1020 8 99\n",
    );
    let log = tree.log.as_mut().unwrap();
    log.push(ADDED.replace("ublkb3", "ublkb3p1"));
    log.push(ADDED.replace("ublkb3", "ublkb3p2"));
    assert!(tree.check().iter().all(|item| item.state != State::NotMet));
    tree.log.as_mut().unwrap().push(ADDED.replace("ublkb3", "ublkb3p2").replace("SSDsc", "SS"));
    tree.fails("discard", "/dev/ublkb3p2: swapon has not asked for discards");
    for log in [Ok(Vec::new()), Err("cannot read /dev/kmsg".to_owned())] {
        let tree = Tree { log, ..Tree::whole() };
        let all = tree.check();
        let item = all.iter().find(|item| item.name == "discard").unwrap();
        assert_eq!(item.state, State::Unseen, "{item}");
        assert!(all_required_met(&all));
    }
}

#[test]
fn advice_is_given_and_does_not_fail_the_check() {
    for (name, file, value) in [
        ("disk-queue", "rotational", "1"),
        ("disk-queue", "logical_block_size", "512"),
        ("disk-queue", "physical_block_size", "512"),
        ("disk-cache", "write_cache", "write back"),
        ("disk-cache", "fua", "1"),
    ] {
        let tree = Tree::whole();
        tree.put(&format!("sys/class/block/ublkb3/queue/{file}"), value);
        tree.fails(name, value);
    }
    let tree = Tree::whole();
    tree.put("proc/sys/vm/page-cluster", "3\n");
    tree.fails("page-cluster", "2^3 pages");
    let tree = Tree::whole();
    tree.put("sys/power/disk", "[platform] shutdown reboot suspend test_resume\n");
    tree.fails("hibernation", "boot with nohibernate");
    tree.put("sys/power/disk", "[disabled]\n");
    assert!(tree.check().iter().all(|item| item.state != State::NotMet));
}

#[test]
fn an_item_that_cannot_be_read_is_not_met() {
    let tree = Tree::whole();
    tree.remove("proc/12/oom_score_adj");
    tree.fails("oom-score", "cannot read /proc/12/oom_score_adj");
    let tree = Tree::whole();
    tree.remove("sys/class/block/ublkb3/queue/write_cache");
    tree.fails("disk-cache", "cannot read");
}

#[test]
fn an_unlocked_mapping_is_named() {
    let smaps = "\
7f00-7f01 rw-p 00000000 00:00 0                          [heap]
Size:                  4 kB
Rss:                   4 kB
VmFlags: rd wr mr mw me lo ac
7f02-7f0f ---p 00000000 00:00 0                          [heap]
Size:              12288 kB
Rss:                   0 kB
VmFlags: mr mw me lo ac
7f0f-7f10 rw-s 00000000 00:01 99                         /memfd:platen-heap (deleted)
Size:               7168 kB
Rss:                 100 kB
VmFlags: rd wr sh mr mw me lo
7f10-7f20 r--p 00000000 00:00 0                          [vvar]
VmFlags: rd mr pf io de dd
7f20-7f21 ---p 00000000 00:00 0
VmFlags: mr mw me
7f30-7f40 r-xp 00000000 08:01 99                         /usr/lib/libc.so.6
VmFlags: rd ex mr mw me
7f40-7f50 r--s 00000000 00:05 99                         /dev/ublkc0
VmFlags: rd sh mr
";
    let Mappings { unlocked, locked_kib } = Mappings::of(smaps);
    assert_eq!(unlocked.len(), 1, "{unlocked:?}");
    assert!(unlocked[0].ends_with("libc.so.6"));
    // Reserved addresses are locked too, and have no memory.
    assert_eq!(locked_kib, 104);
    assert_eq!(Mappings::of(""), Mappings::default());
}

#[test]
fn a_process_without_precautions_fails_the_check() {
    let own = [std::process::id()];
    let items = check(&Subject {
        pids: &own,
        disk: Some(Path::new("/dev/null")),
        memory: None,
        keeper: "x",
    });
    let met = |name| items.iter().find(|item| item.name == name).unwrap().state == State::Met;
    assert!(!met("memory-locked") && !met("swap-on") && !met("discard") && !met("keeper"));
    assert!(!all_required_met(&items));
    for item in &items {
        println!("{item}");
        assert!(!item.found.is_empty());
    }
}

#[test]
fn the_remedy_depends_on_the_owner_of_the_cgroup() {
    for (path, what) in [
        ("/system.slice/platen.service", "in its unit"),
        ("/user.slice/user-0.slice/session-3.scope", "systemd-run"),
        ("/", "make a cgroup"),
        ("/lxc/web", "memory.swap.max"),
    ] {
        assert!(process::remedy(path).contains(what), "{path}: {}", process::remedy(path));
    }
}
