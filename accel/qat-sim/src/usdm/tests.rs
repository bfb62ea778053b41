use super::*;

#[test]
fn the_device_sees_an_allocation_and_not_one_byte_more() {
    let usdm = Usdm::default();
    let memory = usdm.allocate(5000, 64);
    let iova = usdm.physical(memory);
    assert_ne!(iova, 0);
    assert_ne!(iova, memory as u64);
    assert!(iova < 1 << 39);
    assert_eq!(usdm.address(iova), memory);
    assert!(usdm.write(iova, &[7; 5000]));
    let mut back = [0; 5000];
    assert!(usdm.read(iova, &mut back));
    assert_eq!(back, [7; 5000]);
    assert!(!usdm.write(iova, &[1; 5001]));
    assert!(!usdm.write(iova + 1, &[1; 5000]));
    assert!(!usdm.read(iova - 1, &mut [0; 1]));
    assert!(usdm.read(iova, &mut back));
    assert_eq!(back, [7; 5000], "a refused write writes nothing");
    assert_eq!(usdm.physical(memory.wrapping_byte_add(4999)), iova + 4999);
    assert_eq!(usdm.physical(memory.wrapping_byte_add(5000)), 0);
    assert!(usdm.free(memory));
    assert!(!usdm.free(memory));
    assert_eq!(usdm.physical(memory), 0);
    assert!(!usdm.read(iova, &mut [0; 1]));
    assert_eq!(usdm.violations(), 1);
}

#[test]
fn allocations_never_touch_each_other() {
    let usdm = Usdm::default();
    let mut all: Vec<(usize, usize)> = Vec::new();
    for index in 1..200_usize {
        let bytes = index * 977 % 20_000 + 1;
        let align = 1 << (index % 23);
        let memory = usdm.allocate(bytes, align) as usize;
        assert_ne!(memory, 0);
        assert_eq!(memory % align, 0);
        assert!(all
            .iter()
            .all(|(start, size)| memory + bytes + PAGE <= start.next_multiple_of(PAGE)
                || start + size.next_multiple_of(PAGE) + PAGE <= memory));
        all.push((memory, bytes));
        if index % 3 == 0 {
            let (start, _) = all.swap_remove(index % all.len());
            assert!(usdm.free(start as *mut c_void));
        }
    }
}

#[test]
fn bounds_and_limit_of_the_real_library_hold() {
    let usdm = Usdm::default();
    for (bytes, align) in [(0, 64), ((64 << 20) + 1, 64), (64, 0), (64, 3), (64, 8 << 20)] {
        assert!(usdm.allocate(bytes, align).is_null(), "{bytes} bytes at {align}");
    }
    usdm.configure(MemoryMode::Guard, Some(8192));
    let memory = usdm.allocate(8192, 64);
    assert!(!memory.is_null());
    assert!(usdm.allocate(1, 64).is_null());
    assert!(usdm.free(memory));
    assert!(!usdm.allocate(1, 64).is_null());
}

#[test]
fn slabs_are_shared_and_the_device_reaches_all_of_one() {
    let usdm = Usdm::default();
    usdm.configure(MemoryMode::Slab, None);
    let first = usdm.allocate(100, 64);
    let second = usdm.allocate(100, 64);
    assert_eq!(second as usize - first as usize, 128);
    assert_eq!(usdm.physical(second) - usdm.physical(first), 128);
    assert!(usdm.write(usdm.physical(first), &[1; 300]));
    assert!(!usdm.write(usdm.physical(first), &vec![1; SLAB + 1]));
    let large = usdm.allocate(3 << 20, 4 << 20);
    assert_eq!(large as usize % (4 << 20), 0);
    for memory in [first, second, large] {
        assert!(usdm.free(memory));
    }
    assert_eq!(usdm.physical(first), 0);
}
