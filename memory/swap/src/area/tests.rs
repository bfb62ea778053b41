use super::*;
use std::process::Command;

#[test]
fn other_tools_recognise_the_swap_header() {
    let page = header(1 << 20, [0xff; 16]).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().write_all_at(&page, 0).unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let asked = Command::new("blkid").args(["-p", "-o", "export"]).arg(file.path()).output();
    let Ok(said) = asked else {
        println!("skipped: no blkid");
        return;
    };
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("TYPE=swap") && said.contains("LABEL=platen"), "{said}");
    assert!(said.contains("UUID=ffffffff-ffff-4fff-bfff-ffffffffffff"), "{said}");
}

#[test]
fn the_last_page_is_the_devices_last_or_the_most_that_can_be_counted() {
    let last = |size| {
        let page = header(size, [0; 16]).unwrap();
        u32::from_ne_bytes(page[1028..1032].try_into().unwrap())
    };
    assert_eq!(last(40960), 9);
    assert_eq!(last(45055), 9);
    assert_eq!(last(1 << 50), u32::MAX - 1);
    assert!(header(40959, [0; 16]).is_err());
}

#[test]
fn areas_fill_the_disk_without_a_gap() {
    for (size, number) in [(512 << 20, 14), ((64 << 20) + 4096, 4), (100 << 20, 6), (7 << 40, 14)] {
        let mut end = 0;
        let mut count = 0;
        for (start, len) in ranges(size, number) {
            assert_eq!((start, start % ALIGNMENT), (end, 0));
            assert!(len >= LEAST_AREA, "{len} of {size}");
            end = start + len;
            count += 1;
        }
        assert_eq!((end, count), (size, number));
    }
}

#[test]
fn areas_are_added_behind_the_last_one_up_to_the_disk_s_end() {
    use partition::Partition;
    let fourteen = |each: u64| -> Vec<Partition> {
        (1..=14)
            .map(|number| Partition { number, start: u64::from(number - 1) * each, len: each })
            .collect()
    };
    for (each, size, expected) in [
        (64 << 20, 896 << 20, 0),
        (64 << 20, (896 << 20) + 4096, 0),
        (64 << 20, (896 << 20) + (1 << 20), 1),
        (64 << 20, 1152 << 20, 4),
        (64 << 20, (960 << 20) + 8192, 1),
        (64 << 20, 1280 << 20, 6),
        // As many as there may be: larger ones.
        (64 << 20, 8 << 30, 6),
    ] {
        let before = fourteen(each);
        let added = additions(size, &before);
        assert_eq!(added.len(), expected, "{size}");
        let mut end = 14 * each;
        for (nth, &(number, start, len)) in added.iter().enumerate() {
            assert_eq!((number as usize, start), (15 + nth, end));
            assert!(number <= partition::LAST && len >= ALIGNMENT);
            end += len;
        }
        assert!(expected == 0 || end == size);
    }
    let full = vec![Partition { number: partition::LAST, start: 0, len: 32 << 20 }];
    assert_eq!(additions(1 << 30, &full), []);
    assert_eq!(additions(1 << 30, &[]), []);
}

#[test]
fn a_disk_s_areas_are_found_in_the_kernel_s_list_by_their_whole_names() {
    let swaps = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n\
                     /dev/ublkb10                            partition\t1024\t\t8\t\t-2\n\
                     /dev/ublkb1p1                           partition\t2048\t\t16\t\t100\n\
                     /dev/ublkb1p2                           partition\t4096\t\t0\t\t99\n\
                     /dev/ublkb2                             partition\t512\t\t4\t\t7\n\
                     /dev/ublkb10p1                          partition\t1024\t\t8\t\t-2\n\
                     /dev/sda2                               partition\t1024\t\t8\t\t-2\n";
    let used = |disk| sum(find(swaps, disk).map(|(_, used)| used));
    let both = Use { size_kib: 6144, used_kib: 16, priority: 100 };
    assert_eq!(used("/dev/ublkb1"), Some(both));
    assert_eq!(used("/dev/ublkb2"), Some(Use { size_kib: 512, used_kib: 4, priority: 7 }));
    assert_eq!(used("/dev/sda"), Some(Use { size_kib: 1024, used_kib: 8, priority: -2 }));
    assert_eq!(used("/dev/ublkb3"), None);
    assert_eq!(find("", "/dev/ublkb1").count(), 0);
    assert_eq!(find("head\n/dev/ublkb1 partition\n", "/dev/ublkb1").count(), 0);
}
