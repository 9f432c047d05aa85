"""Small tasks for code models: functions with descriptions, and asserts after each, written for xtk.

A model gets the lines from `def` to the description's end, and its continuation runs against the asserts. Running this
file tests the functions below.
"""


def count_vowels(text):
    """Return how many letters of a text are vowels (a, e, i, o, u), in either case."""
    return sum(letter in "aeiou" for letter in text.lower())


assert count_vowels("Apple pie") == 4
assert count_vowels("") == 0
assert count_vowels("XYZ") == 0


def average(numbers):
    """Return the arithmetic mean of a list of numbers, or 0 if the list is empty."""
    return sum(numbers) / len(numbers) if numbers else 0


assert average([2, 4, 9]) == 5
assert average([-1, 1]) == 0
assert average([]) == 0


def last_word(text):
    """Return the last word of a text whose words are separated by spaces, or "" if it has none."""
    words = text.split()
    return words[-1] if words else ""


assert last_word("a small test") == "test"
assert last_word("  end  ") == "end"
assert last_word("   ") == ""


def celsius(fahrenheit):
    """Convert degrees Fahrenheit to degrees Celsius."""
    return (fahrenheit - 32) * 5 / 9


assert celsius(32) == 0
assert celsius(212) == 100
assert celsius(-40) == -40


def double_all(numbers):
    """Return a new list with each number multiplied by two."""
    return [2 * number for number in numbers]


assert double_all([1, -3, 0]) == [2, -6, 0]
assert double_all([]) == []
assert double_all([7]) == [14]


def only_even(numbers):
    """Return the even numbers of a list, in their order."""
    return [number for number in numbers if number % 2 == 0]


assert only_even([5, 2, 8, 3, 0]) == [2, 8, 0]
assert only_even([1, 3]) == []
assert only_even([-2, -1]) == [-2]


def is_leap_year(year):
    """Return whether a year of the Gregorian calendar has 366 days."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


assert is_leap_year(2024) is True
assert is_leap_year(1900) is False
assert is_leap_year(2000) is True
assert is_leap_year(2023) is False


def reverse_words(text):
    """Return the words of a text in reverse order, separated by single spaces."""
    return " ".join(reversed(text.split()))


assert reverse_words("one two three") == "three two one"
assert reverse_words("word") == "word"
assert reverse_words("") == ""


def longest(words):
    """Return the longest string of a list, the first of them if several are equally long."""
    return max(words, key=len)


assert longest(["a", "abc", "ab"]) == "abc"
assert longest(["xy", "zz"]) == "xy"
assert longest([""]) == ""


def square_sum(limit):
    """Return the sum of the squares of the numbers from 1 to limit, inclusive."""
    return sum(number**2 for number in range(1, limit + 1))


assert square_sum(3) == 14
assert square_sum(1) == 1
assert square_sum(0) == 0


def letter_counts(text):
    """Return a dictionary from each character of a text to how often it occurs."""
    return {letter: text.count(letter) for letter in text}


assert letter_counts("abca") == {"a": 2, "b": 1, "c": 1}
assert letter_counts("") == {}
assert letter_counts("zz") == {"z": 2}


def without_duplicates(items):
    """Return the items of a list without repetitions, in the order of their first occurrence."""
    return list(dict.fromkeys(items))


assert without_duplicates([3, 1, 3, 2, 1]) == [3, 1, 2]
assert without_duplicates(["b", "a", "b"]) == ["b", "a"]
assert without_duplicates([]) == []


def clamp(value, low, high):
    """Return the value, but at least low and at most high."""
    return max(low, min(high, value))


assert clamp(5, 0, 3) == 3
assert clamp(-1, 0, 3) == 0
assert clamp(2, 0, 3) == 2


def digit_sum(number):
    """Return the sum of the decimal digits of a non-negative integer."""
    return sum(map(int, str(number)))


assert digit_sum(493) == 16
assert digit_sum(0) == 0
assert digit_sum(1000) == 1


def initials(name):
    """Return the first letters of all words of a name, in upper case: "ada king lovelace" gives "AKL"."""
    return "".join(word[0].upper() for word in name.split())


assert initials("ada king lovelace") == "AKL"
assert initials("Bo") == "B"
assert initials("") == ""


def greatest_common_divisor(first, second):
    """Return the greatest common divisor of two positive integers."""
    while second:
        first, second = second, first % second
    return first


assert greatest_common_divisor(12, 18) == 6
assert greatest_common_divisor(7, 5) == 1
assert greatest_common_divisor(9, 9) == 9


def second_largest(numbers):
    """Return the second largest of the different numbers of a list with at least two different numbers."""
    return sorted(set(numbers))[-2]


assert second_largest([4, 9, 1, 9]) == 4
assert second_largest([1, 2]) == 1
assert second_largest([-5, -2, -9]) == -5


def swap_case(text):
    """Return a text with small letters in place of capital ones, and capital letters in place of small ones."""
    return text.swapcase()


assert swap_case("aBc 1") == "AbC 1"
assert swap_case("") == ""
assert swap_case("OK") == "ok"


def merge_sorted(first, second):
    """Return one sorted list of the items of two sorted lists."""
    return sorted(first + second)


assert merge_sorted([1, 4], [2, 3]) == [1, 2, 3, 4]
assert merge_sorted([], [5]) == [5]
assert merge_sorted([1, 1], [1]) == [1, 1, 1]


def invert(mapping):
    """Return a dictionary from the values of a dictionary to their keys."""
    return {value: key for key, value in mapping.items()}


assert invert({"a": 1, "b": 2}) == {1: "a", 2: "b"}
assert invert({}) == {}
assert invert({5: "x"}) == {"x": 5}


def running_total(numbers):
    """Return the list of the sums of the first one, two, three, ... numbers."""
    totals, total = [], 0
    for number in numbers:
        total += number
        totals.append(total)
    return totals


assert running_total([1, 2, 3]) == [1, 3, 6]
assert running_total([]) == []
assert running_total([5, -5]) == [5, 0]


def count_words(text):
    """Return the number of words of a text; words are separated by white space."""
    return len(text.split())


assert count_words("to be or  not") == 4
assert count_words("") == 0
assert count_words("line\nbreak") == 2


def is_sorted(items):
    """Return whether no item of a list is smaller than the one before it."""
    return sorted(items) == items


assert is_sorted([1, 2, 2, 5]) is True
assert is_sorted([2, 1]) is False
assert is_sorted([]) is True


def multiplication_row(number, length):
    """Return the first `length` multiples of a number: number, 2 * number, and so on."""
    return [number * factor for factor in range(1, length + 1)]


assert multiplication_row(3, 4) == [3, 6, 9, 12]
assert multiplication_row(7, 1) == [7]
assert multiplication_row(5, 0) == []


def remove_spaces(text):
    """Return a text without its space characters."""
    return text.replace(" ", "")


assert remove_spaces(" a b ") == "ab"
assert remove_spaces("none") == "none"
assert remove_spaces("") == ""


def smallest_position(numbers):
    """Return the position, from 0, of the first smallest number of a list that is not empty."""
    return numbers.index(min(numbers))


assert smallest_position([4, 1, 7, 1]) == 1
assert smallest_position([2]) == 0
assert smallest_position([3, 2, -1]) == 2


def format_time(seconds):
    """Return a number of seconds as minutes and seconds with two digits each: 125 gives "02:05"."""
    return f"{seconds // 60:02d}:{seconds % 60:02d}"


assert format_time(125) == "02:05"
assert format_time(0) == "00:00"
assert format_time(600) == "10:00"


def chunks(items, size):
    """Split a list into consecutive lists of the given size; the last one may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]


assert chunks([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
assert chunks([], 3) == []
assert chunks([1, 2], 5) == [[1, 2]]


def number_of_divisors(number):
    """Return how many positive integers divide a positive integer without a remainder."""
    return sum(number % divisor == 0 for divisor in range(1, number + 1))


assert number_of_divisors(12) == 6
assert number_of_divisors(1) == 1
assert number_of_divisors(7) == 2


def to_binary(number):
    """Return a non-negative integer in binary notation, without a prefix: 6 gives "110"."""
    return format(number, "b")


assert to_binary(6) == "110"
assert to_binary(0) == "0"
assert to_binary(255) == "11111111"


def common_items(first, second):
    """Return the sorted list of the values that are in both lists, each once."""
    return sorted(set(first) & set(second))


assert common_items([3, 1, 2, 3], [3, 5, 1]) == [1, 3]
assert common_items([1], [2]) == []
assert common_items([], [1]) == []


def transpose(rows):
    """Return the columns of a table that is given as a list of rows of equal length, as a list of lists."""
    return [list(column) for column in zip(*rows, strict=True)]


assert transpose([[1, 2, 3], [4, 5, 6]]) == [[1, 4], [2, 5], [3, 6]]
assert transpose([[7]]) == [[7]]
assert transpose([["a"], ["b"]]) == [["a", "b"]]


def price_with_discount(price, percent):
    """Return a price that is reduced by a percentage: a price of 80 with 25 percent gives 60."""
    return price * (100 - percent) / 100


assert price_with_discount(80, 25) == 60
assert price_with_discount(10, 0) == 10
assert price_with_discount(50, 100) == 0


def starts_with_capital(words):
    """Return how many strings of a list begin with a capital letter; some may be empty."""
    return sum(word[:1].isupper() for word in words)


assert starts_with_capital(["Anna", "bob", "", "Carl"]) == 2
assert starts_with_capital([]) == 0
assert starts_with_capital(["x"]) == 0


def flatten(lists):
    """Return one list with the items of all inner lists, in their order."""
    return [item for inner in lists for item in inner]


assert flatten([[1, 2], [], [3]]) == [1, 2, 3]
assert flatten([]) == []
assert flatten([["a"], ["b"]]) == ["a", "b"]


def factorial(number):
    """Return the product of the integers from 1 to a non-negative number; 1 for 0."""
    product = 1
    for factor in range(2, number + 1):
        product *= factor
    return product


assert factorial(5) == 120
assert factorial(0) == 1
assert factorial(3) == 6
