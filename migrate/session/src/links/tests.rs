use super::*;
use std::net::TcpListener;

#[test]
fn the_role_of_the_first_link_is_passed_on_and_one_link_at_a_time_has_it() {
    let links = Links::new(2, Duration::from_secs(1));
    assert_eq!([5, 5, 6].map(|id| links.role(id)), [Role::First, Role::First, Role::Other]);
    links.release_roles(6);
    assert_eq!(links.role(6), Role::Other);
    links.release_roles(5);
    assert_eq!([6, 5].map(|id| links.role(id)), [Role::First, Role::Other]);
}

#[test]
fn a_link_that_was_never_there_is_missing_since_the_beginning() {
    let links = Links::new(2, Duration::from_secs(1));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    links.add(0, TcpStream::connect(listener.local_addr().unwrap()).unwrap());
    let (number, place) = links.missing(0).place.unwrap();
    assert_eq!((number, place.gone), (1, Some(links.began)));
    assert!(!place.flaps);
}

#[test]
fn without_any_link_those_that_were_there_are_tried_first() {
    let links = Links::new(4, Duration::from_secs(1));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (first, other) = (links.add(0, socket()).0, links.add(2, socket()).0);
    let turns = || [0, 1, 2, 3].map(|turn| links.missing(turn).place.unwrap().0);
    let why = SessionError::Local { reason: "the test".into() };
    links.lose(&other, &why);
    assert_eq!(turns(), [1, 1, 2, 3]);
    links.lose(&first, &why);
    assert_eq!(turns(), [0, 2, 2, 0]);
}

#[test]
fn a_lost_priority_link_is_replaced_and_a_single_link_has_no_priority() {
    let links = Links::new(3, Duration::from_secs(1));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let [a, b, c] = [0, 1, 2].map(|number| links.add(number, socket()).0);
    let roles = || [&a, &b, &c].map(|link| links.role(link.id));
    assert_eq!(roles(), [Role::First, Role::Other, Role::Other]);
    assert!(
        links.want_priority_link() && !links.has_priority_link() && !links.want_priority_link()
    );
    assert_eq!(roles(), [Role::First, Role::Priority, Role::Other]);
    let why = SessionError::Local { reason: "the test".into() };
    // The priority link is lost: another link takes the role.
    links.lose(&b, &why);
    assert!(!links.has_priority_link());
    assert_eq!([&a, &c].map(|link| links.role(link.id)), [Role::First, Role::Priority]);
    // The first link is lost: the priority link does not take its role, the new link does.
    links.lose(&a, &why);
    let b = links.add(1, socket()).0;
    assert_eq!([&c, &b].map(|link| links.role(link.id)), [Role::Priority, Role::First]);
    // A single link is no priority link; when the next one opens there is one again.
    links.lose(&b, &why);
    assert_eq!(links.role(c.id), Role::First);
    assert!(!links.has_priority_link());
    let a = links.add(0, socket()).0;
    assert_eq!([&c, &a].map(|link| links.role(link.id)), [Role::First, Role::Priority]);
}

#[test]
fn a_link_replaced_while_it_is_being_lost_is_counted_once() {
    let links = Links::new(1, Duration::from_secs(1));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let why = SessionError::Local { reason: "the test".into() };
    let old = links.add(0, socket()).0;
    // Its reader has marked it, but not removed it yet when the new one opens.
    assert!(old.mark_dead());
    let (new, replaced) = links.add(0, socket());
    assert_eq!(replaced.map(|link| link.id), Some(old.id));
    assert_eq!(links.lose(&old, &why).links, 1);
    assert_eq!(links.links_up(), 1);
    assert_eq!(links.lose(&new, &why).links, 0, "no link is left, and nobody will ever know");
    assert!(lock(&links.table).outage.is_some());
}
