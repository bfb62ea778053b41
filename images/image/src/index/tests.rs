use super::*;

fn index() -> (Index, Shape, u64) {
    let shape = Shape::new(4096, 64 << 10).unwrap();
    let unit = |pages, offset, len| {
        let checksum = 0x0102_0304_0506_0708;
        UnitEntry { file: 0, pages, offset, len, checksum }
    };
    let extent = |first, pages, content| Extent { first, pages, content };
    let ram = vec![
        extent(0, 3, Content::Zero),
        extent(3, 16, Content::Slot(1)),
        extent(19, 1, Content::Filled(*b"abcdefgh")),
        extent(20, 1, Content::Slot(0)),
    ];
    let rom = vec![extent(0, 2, Content::Slot(17))];
    let block = |name: &str, pages, host_page, extents| Block {
        name: name.into(),
        pages,
        host_page,
        extents,
    };
    let blocks = vec![block("pc.ram", 21, 0, ram), block("pc.rom", 2, 2 << 20, rom)];
    let units = vec![unit(16, 64, 1000), unit(3, 1064, 300)];
    (Index { slots: 19, units, blocks }, shape, 1364)
}

#[test]
fn it_comes_back_and_any_cut_or_more_is_refused() {
    let (index, shape, end) = index();
    let bytes = index.to_bytes().unwrap();
    assert_eq!(Index::from_bytes(&bytes, shape, end), Ok(index));
    for len in 0..bytes.len() {
        assert!(Index::from_bytes(&bytes[..len], shape, end).is_err(), "cut at {len}");
    }
    assert!(Index::from_bytes(&[&bytes[..], &[0]].concat(), shape, end).is_err());
    assert!(Index::from_bytes(&bytes, shape, end + 1).is_err());
}

#[test]
fn pages_are_found_in_their_extents() {
    let (index, ..) = index();
    let ram = &index.blocks[0];
    assert_eq!(ram.content(2), Some(Content::Zero));
    assert_eq!(ram.content(18), Some(Content::Slot(16)));
    assert_eq!(ram.content(19), Some(Content::Filled(*b"abcdefgh")));
    assert_eq!(ram.content(20), Some(Content::Slot(0)));
    assert_eq!(ram.content(21), None);
    assert_eq!([0, 1, 2].map(|unit| index.unit_pages(unit)), [16, 3, 0]);
}

#[test]
fn numbers_beyond_the_limits_are_refused_by_name() {
    let (index, shape, end) = index();
    let refused = |change: fn(&mut Index)| {
        let mut index = index.clone();
        change(&mut index);
        let bytes = index.to_bytes().unwrap();
        Index::from_bytes(&bytes, shape, end).unwrap_err().to_string()
    };
    assert!(refused(|i| i.blocks[1].name = "pc.ram".into()).contains("a block twice"));
    assert!(refused(|i| i.blocks[0].pages = 1 << 40).contains("more RAM"));
    assert!(refused(|i| i.blocks[0].pages = 10).contains("does not fit its block"));
    assert!(refused(|i| i.blocks[0].host_page = 3).contains("page size"));
    assert!(refused(|i| i.slots = 18).contains("slot that does not exist"));
    assert!(refused(|i| i.slots = 1 << 60).contains("room for"));
    assert!(refused(|i| i.units[0].len = 20).contains("another length"));
    assert!(refused(|i| i.units[0].len = 1 << 20).contains("another length"));
}
