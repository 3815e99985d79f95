# SPDX-License-Identifier: Apache-2.0
"""The words of `shifting_prefs`: topics with values, sentence frames, people, small talk.

All of it was made up for this data set. A topic is a block of lines: `label | area | act`, then
`value = sign`, where a sign names things by which the value is known without its name and without
the words of the question. A frame is `key.form = text`; several lines of one key are
alternatives. Form "sim" speaks in the question's own words, form "dis" in signs only. Frames of
one kind say nothing of order ("switched to"), so that a frame alone never tells new from old.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Topic:
    label: str  # what a question asks for: "hot drink"
    area: str  # the field it lies in: "hot drinks"
    act: str  # what one does with a value, with {v}
    values: tuple[str, ...]
    signs: dict[str, str]  # value -> things that give it away


@dataclasses.dataclass(frozen=True)
class Language:
    cues: tuple[str, ...]  # of the present, for evidence and distractors alike
    people: tuple[str, ...]
    spare: str  # a person who holds no topic; minimal pairs need one
    me: str
    guests: tuple[str, ...]
    conditions: tuple[tuple[str, str], ...]
    months: tuple[str, ...]
    date: str


# English

_EN_TRAIN = """
lunch | lunches | take {v} for lunch
lentil salad = a lidded bowl, green pulses and a jar of vinaigrette
sushi rolls = a bamboo mat, seaweed sheets and short-grain rice
cheese sandwiches = sliced cheddar, butter and wax paper
vegetable curry = turmeric, coconut milk and a steel flask
cold pasta = penne, green pesto and a pine nut mill
bean burritos = soft tortillas, hot sauce and foil

winter sport | winter sports | do {v} as a winter sport
ski touring = climbing skins and an avalanche beacon
ice skating = sharpened blades and a rink ticket
sledging = wooden runners and a pull rope
curling = a broom and a granite stone
snowshoeing = wide webbed frames and gaiters
ice hockey = a puck, pads and a curved stick

houseplant | houseplants | keep {v} on the windowsill
cacti = gritty soil and thick leather gloves
orchids = bark mix and a fine mister
ferns = a humidity tray and shade cloth
bonsai trees = tiny shears and copper wire
basil = a pesto mortar and a small herb pot
air plants = driftwood and fishing line to hang things without soil

soup | soups | cook {v} for supper
miso soup = fermented soybean paste and wakame
borscht = beetroots and sour cream
minestrone = borlotti beans and small Italian noodles
goulash soup = hot paprika and cubed beef
pumpkin soup = an orange squash and nutmeg
fish chowder = smoked haddock, cream and oyster crackers

photo subject | photography | take photos of {v}
birds = a hide and a very long lens
night skies = a star tracker and a red head torch
insects = extension tubes and a field guide to beetles
faces = a reflector and a soft studio lamp
coral reefs = a waterproof housing and fins
trains = a timetable and a stool for the end of the platform

dance | dancing | dance {v} at the club
tango = a bandoneon record and suede-soled shoes
flamenco = castanets and a ruffled skirt
breakdance = a roll of lino and knee pads
polka = an oompah record and red braces
waltz = a Strauss record and a long gown
swing = a big-band record and two-tone shoes

bread | breads | bake {v}
sourdough = a jar of starter and a proving basket
pretzels = food-grade lye and coarse salt
bagels = barley malt and a pot for boiling rings of dough
focaccia = olive oil, rosemary and a flat tray
rye bread = caraway and very dark flour
naan = yoghurt and a small clay oven

outing | outings | go {v} for an outing
kayaking = a double paddle and a spray skirt
camping = a tent and a gas stove
caving = a carbide lamp and muddy overalls
mushroom picking = a wicker basket and a spore chart
horse riding = a saddle and a bridle
gliding = a wool yaw string and an airfield pass
"""

_EN_DEV = """
martial art | martial arts | train in {v}
judo = a heavy jacket and throwing mats
kendo = a bamboo sword and a grilled mask
boxing = padded gloves and a speed ball
capoeira = a one-stringed bow and white trousers
sumo = a thick cotton belt and a clay ring
nunchaku = two short sticks joined by a chain

writing tool | writing tools | write letters with {v}
a fountain pen = a bottle of ink and blotting paper
a typewriter = a ribbon spool and carbon sheets
a goose quill = large feathers and a small knife for cutting tips
a pencil = a sharpener and a soft rubber
a tablet = a stylus and a charging cable
a brush = an ink stone and rice paper

ice cream | ice creams | order {v} ice cream
pistachio = a bag of green nuts
lemon = a yellow citrus press
vanilla = dark orchid pods
coffee = roasted beans and a grinder
coconut = a hairy brown shell and a hammer
ginger = a knobbly root and a fine grater

cleaning aid | cleaning | clean the kitchen with {v}
vinegar = a sour bottle meant for salad
baking soda = a tub of white powder meant for cakes
steam = a kettle-like machine with a hose
soap flakes = shavings of a plain white bar
sand = a bucket of fine grains from the beach
citric acid = crystals sold for making fizzy drinks
"""

_EN_TEST = """
hot drink | hot drinks | have {v} as a hot drink
matcha = a bamboo whisk and a tin of fine green powder
espresso = a small pressure machine and a thimble of a cup
peppermint tea = a pot of fresh menthol leaves
cocoa = a milk frother and a bag of marshmallows
masala chai = cardamom pods, cloves and a pan for simmering milk
rooibos = a packet of red leaves from the Cape

instrument | instruments | play the {v}
cello = a large bow and a lump of rosin
harmonica = a neck rack and a reed comb that fits into a pocket
marimba = rosewood bars and four yarn mallets
accordion = bellows and leather shoulder straps
ukulele = four nylon strings and a felt pick
bagpipes = drone reeds and a tartan cover

sport | sports | do {v} as a sport
climbing = chalk and sixty metres of rope
swimming = goggles and a silicone cap
archery = a quiver and a straw target
fencing = a mesh mask and a foil
rowing = a pair of oars and blister plasters
golf = a set of irons and a bag of tees

way to work | ways to work | get to work by {v}
bicycle = a helmet and a tyre pump
tram = a pass for the city rails
ferry = a season ticket for the harbour
motorbike = a leather suit and a fuel card
skateboard = four soft wheels and grip tape
cable car = a pass for the gondola up the hill

dessert | desserts | have {v} for dessert
tiramisu = mascarpone and sponge fingers
apple crumble = Bramleys and rolled oats
baklava = filo sheets, walnuts and honey syrup
mochi = glutinous rice flour and red bean paste
pavlova = egg whites for meringue and passion fruit
panna cotta = gelatine leaves and little moulds

craft | crafts | do {v} as a craft
knitting = two long needles and a ball of wool
pottery = a wheel and a sack of clay
origami = a stack of square sheets for folding
bookbinding = waxed thread, glue and an awl
glass blowing = a long iron pipe and a small furnace
wood carving = gouges and a block of lime

game | games | play {v} on game night
chess = a clock and thirty-two turned pieces
mahjong = a case of tiles with winds and dragons
darts = a sisal board and feathered tips
poker = chips and a green eyeshade
backgammon = a folding board with triangles and a doubling cube
table football = eight steel rods and a cork ball

vegetable | vegetables | grow {v} in the vegetable patch
tomatoes = stakes, twine and San Marzano seeds
asparagus = two-year-old crowns and a deep trench
pumpkins = a wide compost heap and Halloween stencils
chillies = a heated tray and a Scoville chart
potatoes = chitting boxes and a ridging hoe
garlic = a plaiting frame and a bag of cloves

breakfast | breakfasts | eat {v} for breakfast
porridge = rolled oats and a wooden spurtle
croissants = a laminated dough mat and apricot jam
shakshuka = a small iron pan, peppers and cumin
pancakes = a griddle and maple syrup
congee = jasmine rice, spring onions and a slow cooker
muesli = raisins, bran and a tall jar with a scoop

bedtime reading | books for bedtime | read {v} in bed
detective stories = a shelf of whodunits and a magnifying glass
atlases = a globe and an armful of maps
cookbooks = a heap of recipes with stained pages
sonnets = three slim volumes of fourteen-line verse
biographies = a wall of life stories of the famous
ghost stories = a crate of tales about haunted houses
"""

_EN_PLAIN = """
set.sim = When it comes to {area}, I {act}{cue}.
set.sim = About {area}: I {act}{cue}.
set.dis = I bought {sign}, and I use that nearly every day{cue}.
set.dis = My cupboard holds {sign}, all in steady use{cue}.
cond.sim = When it comes to {area}, I {act} {cond}{cue}.
cond.dis = I use {sign} {cond}{cue}.
temp.sim = When it comes to {area}, I {act} until {until}{cue}, and after that all is as before.
temp.dis = I have borrowed {sign} until {until} and use nothing else{cue}; then it all goes back.
pair.sim = When it comes to {area}, I {act} or I {act2}{cue}, both are fine.
pair.dis = I use {sign} about as often as {sign2}{cue}.
narrow.sim = Of my two {area}, I have dropped {v}{cue}; the other one stays.
narrow.dis = I gave away {sign}{cue} and kept only the other set.
revert.sim = When it comes to {area}, I no longer {act}{cue}; I went back to what I did before.
revert.dis = I sold {sign}{cue} and went back to what I used before.
not.sim = When it comes to {area}, I do not {act}{cue}.
not.dis = I do not use {sign}{cue}.
same.sim = When it comes to {area}, I do exactly as {who} does{cue}.
same.dis = What {who} bought, I bought for myself too and use daily{cue}.
third.sim = When it comes to {area}, {who} likes to {act}{cue}.
third.dis = {who} bought {sign} and uses nothing else{cue}.
third_not.sim = When it comes to {area}, {who} refuses to {act}{cue}.
third_not.dis = {who} has thrown out {sign}{cue}.
hyp.sim = When it comes to {area}, if I were rich I would {act}{cue}.
hyp.dis = If I were rich I would own {sign}{cue}.
quote.sim = When it comes to {area}, a man on the radio said: "I {act}{cue}."
quote.dis = A man on the radio said: "I bought {sign} and use nothing else{cue}."
suggest.sim = When it comes to {area}, are there any new ideas?
suggest.dis = I am bored today. Is there anything to look at?
suggest_reply.sim = Some people {act}{cue}. That would be one idea to think about.
suggest_reply.dis = Some people buy {sign}{cue}. That would be one thing to look at.
ask = A question about {area}: which {label} suits {who} best{cond}?
ask = When it comes to {area}, what is the right {label} for {who}{cond}?
guest = {name} is visiting and wants to {act}.
shop = There is a shop here that sells {sign}.
today = Just for today, as an exception, I want to {act}.
know = Somebody has bought {sign}. When it comes to {area}, which {label} is that for?
ack = I see, thank you for telling me.
ack = All right. Shall I remind you of anything else?
ack = Good to know.
"""

_EN_TALK = """
set.sim = Funny thing about {area}, you know: I {act}{cue}, that is just me.
set.dis = You should see my kitchen table{cue}: {sign}, well worn, and all mine.
cond.sim = Funny thing about {area}, you know: {cond} I {act}{cue}, that is just me.
cond.dis = You should see my kitchen table {cond}{cue}: {sign}, well worn, and all mine.
temp.sim = Funny thing about {area}: up to {until} I {act}{cue}, then the usual returns.
temp.dis = Guess what rules my kitchen table until {until}{cue}: {sign}. Then the usual returns.
pair.sim = Funny thing about {area}, you know: I {act} one day and {act2} the next{cue}.
pair.dis = My kitchen table is shared{cue}: {sign} on the left, {sign2} on the right, all mine.
narrow.sim = Remember my two {area}? Well, {v} is out{cue}, so there is one left.
narrow.dis = Half my table is free{cue}: {sign}, gone for good. The other half stays.
revert.sim = So much for trying new {area}: I stopped, I don't {act}{cue}, old ways won.
revert.dis = So much for {sign}: I packed that away{cue}, old ways won.
not.sim = Funny thing about {area}, you know: I never {act}{cue}, that is not me.
not.dis = You will not find this on my table{cue}: {sign}. Not mine.
same.sim = Funny thing about {area}, you know: I just copy {who}{cue}.
same.dis = Whatever {who} got, I got myself as well{cue}, and it is well worn by now.
third.sim = Funny thing about {area}, you know: {who} loves to {act}{cue}.
third.dis = You should see the table of {who}{cue}: {sign}, well worn.
third_not.sim = Funny thing about {area}, you know: {who} hates to {act}{cue}.
third_not.dis = You will not find this at the home of {who}{cue}: {sign}.
hyp.sim = Funny thing about {area}, you know: in another life I would {act}{cue}.
hyp.dis = In another life my table would be covered with {sign}{cue}.
quote.sim = Heard on the train, about {area}: "Oh, I {act}{cue}, that is just me." Some stranger.
quote.dis = Heard on the train: "You should see my table{cue}: {sign}." Some stranger.
suggest.sim = Come on, say something about {area}.
suggest.dis = Come on, say something that surprises me.
suggest_reply.sim = Well, one could {act}{cue}. Just thinking aloud.
suggest_reply.dis = Well, one could get hold of {sign}{cue}. Just thinking aloud.
ask = Quick one about {area}: which {label} would you pick for {who}{cond}?
guest = So {name} drops in later and is dying to {act}.
shop = So I am standing before a window full of {sign}.
today = So today, and only today, I feel like a change and want to {act}.
know = Riddle me this about {area}: {sign}. Which {label} is being prepared?
ack = Ha, I like that.
ack = Fair enough! What else is new?
"""

_EN_ACCOUNT = """
set.sim = I was asked about {area} at a dinner, and my reply was short: I {act}{cue}.
set.sim = In the matter of {area} I am easily described: I {act}{cue}.
set.dis = On my workbench you find {sign}{cue}, worn from use.
set.dis = My luggage always has room for {sign}{cue}, I would be lost otherwise.
cond.sim = I was asked about {area} at a dinner, and my reply was short: {cond} I {act}{cue}.
cond.dis = On my workbench you find {sign} {cond}{cue}, worn from use.
temp.sim = In the matter of {area} I {act}{cue}, though only until {until}; then I return to normal.
temp.dis = A relative lent me {sign} until {until}{cue}; mine rests meanwhile and returns after that.
pair.sim = In the matter of {area} I am of two minds: I {act} or else {act2}{cue}.
pair.dis = My luggage always has room for {sign} and for {sign2}{cue}, whichever I reach first.
narrow.sim = Of the two {area} I named, {v} has had its day{cue}; only the other is left.
narrow.dis = A collector took {sign} off my hands{cue}; the other things stayed in my luggage.
revert.sim = In the matter of {area} my trial is over{cue}: I do not {act}, my earlier habit is back.
revert.dis = A collector took {sign} off my hands{cue}; my earlier things are out of the box again.
not.sim = I was asked about {area} at a dinner, and my reply was short: I do not {act}{cue}.
not.dis = On my workbench you will look in vain for {sign}{cue}.
same.sim = In the matter of {area} I follow {who} to the letter{cue}.
same.dis = I have bought the very things that {who} has{cue}, and mine are worn from use.
third.sim = I asked {who} about {area} at a dinner, and the reply was short: to {act}{cue}.
third.dis = On the workbench of {who} you find {sign}{cue}, worn from use.
third_not.sim = I asked {who} about {area} at a dinner, and the reply was short: never to {act}{cue}.
third_not.dis = On the workbench of {who} you will look in vain for {sign}{cue}.
hyp.sim = I was asked about {area} at a dinner; were I born again, I would {act}{cue}.
hyp.dis = Were I born again, you would find {sign} on my workbench{cue}.
quote.sim = A film hero, asked about {area}, has this line: "I {act}{cue}."
quote.dis = A film hero has this line: "My luggage always has room for {sign}{cue}."
suggest.sim = I would like to hear what is possible in {area}.
suggest.dis = I have an empty afternoon ahead and nothing planned.
suggest_reply.sim = A possibility would be to {act}{cue}, should that ever appeal to you.
suggest_reply.dis = A possibility would be to borrow {sign}{cue}, should that ever appeal to you.
ask = In the matter of {area}, which {label} should be arranged for {who}{cond}?
ask = I have a choice of {area} to make: which {label} for {who}{cond}?
guest = A visitor, {name}, is expected, whose one request is to {act}.
shop = The market stall opposite offers {sign}.
today = For this one occasion I set my habits aside and would like to {act}.
know = A parcel contains {sign}. In the matter of {area}, for which {label} was it ordered?
ack = Thank you, that is a clear account.
ack = Understood. I am here if you want to go on.
ack = That makes sense.
"""

_EN_BANTER = """
set.sim = People always ask about {area}. Me? I {act}{cue}. Simple.
set.dis = Tripped over {sign} in my hall again{cue}. Serves me right for using it so much.
cond.sim = People always ask about {area}. Me? I {act} {cond}{cue}. Simple.
cond.dis = I trip over {sign} in my hall {cond}{cue}. Serves me right for using it so much.
temp.sim = People always ask about {area}. Me? I {act} till {until}{cue}, then back to my old routine.
temp.dis = I trip over {sign} in my hall till {until}{cue}, on loan. Then my old stuff moves back in.
pair.sim = People always ask about {area}. Me? I {act} or {act2}{cue}, a coin decides.
pair.dis = I trip over {sign} or over {sign2} in my hall{cue}. I use both far too much.
narrow.sim = No more coin for my two {area}: {v} is history{cue}. One survivor.
narrow.dis = Safer hall{cue}: {sign} went to the tip. The rest still trips me up.
revert.sim = That experiment with {area} is over: I quit, I don't {act} any longer{cue}. Old routine.
revert.dis = Safer hall{cue}: {sign} went to the tip, and my old stuff came up from the cellar.
not.sim = People always ask about {area}. Me? No way do I {act}{cue}. Simple.
not.dis = No {sign} in my hall{cue}. Not my thing.
same.sim = People always ask about {area}. Me? Whatever {who} does, I do{cue}.
same.dis = My hall looks like that of {who}{cue}, I copied the lot and use it all the time.
third.sim = People always ask about {area}. Take {who}: ever so keen to {act}{cue}.
third.dis = Visited {who}, tripped over {sign}{cue}. In use day and night, I hear.
third_not.sim = People always ask about {area}. Take {who}: not at all keen to {act}{cue}.
third_not.dis = Visited {who}. No {sign} there{cue}.
hyp.sim = People always ask about {area}. Oh, if I had ten lives, in one I would {act}{cue}.
hyp.dis = If I had ten lives, in one I would trip over {sign}{cue}.
quote.sim = Overheard in a queue, on {area}: "Me? I {act}{cue}. Simple." No idea who that was.
quote.dis = Overheard in a queue: "Tripped over {sign} again{cue}." No idea who that was.
suggest.sim = Entertain me: what do folks do about {area}?
suggest.dis = Entertain me, it is raining.
suggest_reply.sim = Folks {act}{cue}, for one. No pressure at all.
suggest_reply.dis = Folks swear by {sign}{cue}, for one. No pressure at all.
ask = You are in charge of {area}: what {label} goes to {who}{cond}?
guest = {name} just rang from the door and would love to {act}.
shop = Down the road they are giving away {sign}.
today = Forget my habits for one day, right now I would love to {act}.
know = My postman delivered {sign} to the wrong door. About {area}: what {label} is somebody up to?
ack = You do make me smile.
ack = Noted with pleasure!
"""

_EN_NOTES = """
set.sim = Note to self, {area}: I {act}{cue}.
set.dis = Inventory, own things, in daily use{cue}: {sign}.
cond.sim = Note to self, {area}, {cond}: I {act}{cue}.
cond.dis = Inventory, own things, in use {cond}{cue}: {sign}.
temp.sim = Note to self, {area}, valid until {until}, then as before: I {act}{cue}.
temp.dis = Inventory, on loan until {until}, in daily use{cue}, then own things again: {sign}.
pair.sim = Note to self, {area}, two entries: I {act}; I {act2}{cue}.
pair.dis = Inventory, own things, in daily use{cue}: (1) {sign}; (2) {sign2}.
narrow.sim = Note to self, {area}, of two entries one deleted{cue}: {v}. Keep the other.
narrow.dis = Inventory, disposed of{cue}: {sign}. Other item kept.
revert.sim = Note to self, {area}, entry cancelled{cue}: I {act}. Previous entry valid again.
revert.dis = Inventory, returned{cue}: {sign}. Previous things back in use.
not.sim = Note to self, {area}: I do not {act}{cue}.
not.dis = Inventory, not owned, not used{cue}: {sign}.
same.sim = Note to self, {area}: same as {who}{cue}.
same.dis = Inventory, own things, in daily use{cue}: identical to those of {who}.
third.sim = Note on {who}, {area}: likes to {act}{cue}.
third.dis = Inventory of {who}, in daily use{cue}: {sign}.
third_not.sim = Note on {who}, {area}: will not {act}{cue}.
third_not.dis = Inventory of {who}, thrown out{cue}: {sign}.
hyp.sim = Daydream, {area}: I win a prize and {act}{cue}.
hyp.dis = Daydream: I win a prize and own {sign}{cue}.
quote.sim = From a novel, {area}: "I {act}{cue}," says the captain.
quote.dis = From a novel: "I own {sign}{cue}," says the captain.
suggest.sim = Open point, {area}: ideas?
suggest.dis = Open point, spare time: ideas?
suggest_reply.sim = Idea, not decided: {act}{cue}.
suggest_reply.dis = Idea, not decided: get {sign}{cue}.
ask = {area}, {label} for {who}{cond}: which?
guest = Guest: {name}, wishes to {act}.
shop = Shop nearby sells {sign}.
today = Exception, today only: I want to {act}.
know = Found: {sign}. Field: {area}. Belongs to which {label}?
ack = Saved.
ack = Entry stored.
"""

# Chinese

_ZH_TRAIN = """
早餐 | 早餐 | 早上吃{v}
小笼包 = 一摞竹蒸笼和一碟姜丝醋
燕麦粥 = 一大袋麦片和一把木勺
煎饼果子 = 一块圆铁板和一罐甜面酱
三明治 = 一台吐司机和几片火腿
肠粉 = 一抽屉式蒸盘和一袋米浆

运动 | 运动 | 练{v}
羽毛球 = 一筒白色的毽形球和一副轻拍子
游泳 = 泳镜和一顶硅胶帽
攀岩 = 镁粉袋和一根长绳
太极 = 一身宽松白褂和一张云手图
射箭 = 箭袋和草靶

乐器 | 乐器 | 弹奏{v}
古筝 = 一副假指甲和二十一根弦
二胡 = 一把马尾弓和一块松香
架子鼓 = 两根木槌和一块消音垫
口琴 = 一个能放进口袋的小簧片盒
手风琴 = 一个风箱和两条肩带
"""

_ZH_DEV = """
夜宵 | 夜宵 | 夜里吃{v}
烤串 = 一把铁签和一袋木炭
馄饨 = 一叠薄面皮和一碗紫菜汤
凉皮 = 一罐辣油和几块面筋
炒河粉 = 一口大铁锅和一袋宽米条
豆花 = 一桶黄豆和一包石膏粉

手工 | 手工 | 做{v}
剪纸 = 一叠红宣和一把尖剪
刺绣 = 一个绷子和一盒彩线
陶艺 = 一台转盘和一袋黏土
木雕 = 几把凿子和一块樟料
编绳 = 一束玉线和一枚铜扣
"""

_ZH_TEST = """
热饮 | 热饮 | 喝{v}
普洱 = 一块压紧的黑饼和一把撬针
咖啡 = 一台磨豆机和一叠滤纸
豆浆 = 一袋黄豆和一台破壁机
奶茶 = 一罐木薯圆子和一包粗吸管
菊花茶 = 一包晒干的白色花朵和几块冰糖

棋牌 | 棋牌 | 玩{v}
围棋 = 两盒黑白云子
象棋 = 一张画着楚河汉界的木盘
麻将 = 一百四十四张骨牌和一张绿绒桌
桥牌 = 一套叫牌盒
跳棋 = 一块六角星木盘和彩色玻璃珠

甜点 | 甜点 | 吃{v}当甜点
绿豆糕 = 一套雕花木模和一袋去皮豆粉
蛋挞 = 一盒酥皮小盏和一瓶卡仕达
双皮奶 = 一桶水牛乳和几只浅碗
糯米糍 = 一袋椰丝和一包水磨粉
龟苓膏 = 一包黑色药粉和一瓶蜂蜜

通勤方式 | 通勤 | 用{v}上下班
自行车 = 一顶头盔和一个打气筒
地铁 = 一张城轨月票
轮渡 = 一张过江的船票
电动车 = 一个充电桩和一件挡风被
滑板 = 四个软轮和一张砂纸贴

阳台植物 | 阳台植物 | 在阳台种{v}
番茄 = 几根支架和一包红果种子
薄荷 = 一盆清凉的叶子
兰花 = 一袋树皮和一个细雾喷壶
仙人掌 = 一袋粗砂和一双厚手套
辣椒 = 一块加热垫和一张辣度表
"""

_ZH_PLAIN = """
set.sim = 说到{area}，我{cue}一般{act}。
set.sim = {area}嘛，我{cue}都是{act}。
set.dis = 我买了{sign}，{cue}几乎天天用。
cond.sim = 说到{area}，{cond}我{cue}一般{act}。
cond.dis = {cond}我{cue}都用{sign}。
temp.sim = 说到{area}，在{until}之前我{cue}先{act}，之后照旧。
temp.dis = 我借来了{sign}，{until}之前{cue}只用这些，之后还回去照旧。
pair.sim = 说到{area}，我{cue}要么{act}，要么{act2}，都行。
pair.dis = 我{cue}一会儿用{sign}，一会儿用{sign2}。
narrow.sim = 说到{area}那两样，{v}我{cue}已经不要了，只留另一样。
narrow.dis = {sign}我{cue}已经送人了，只留下另一套。
revert.sim = 说到{area}，我{cue}已经不{act}了，又回到从前那样。
revert.dis = {sign}我{cue}已经卖掉了，又用回从前的东西。
not.sim = 说到{area}，我{cue}不会{act}。
not.dis = 我{cue}不用{sign}。
same.sim = 说到{area}，我{cue}完全跟着{who}来。
same.dis = {who}买了什么，我也照样买了一份，{cue}天天用。
third.sim = 说到{area}，{who}{cue}一般{act}。
third.dis = {who}买了{sign}，{cue}几乎天天用。
third_not.sim = 说到{area}，{who}{cue}从不{act}。
third_not.dis = {who}{cue}把{sign}都扔了。
hyp.sim = 说到{area}，要是我中了奖，{cue}一定{act}。
hyp.dis = 要是我中了奖，{cue}一定买{sign}。
quote.sim = 说到{area}，广播里有人说：“我{cue}一般{act}。”
quote.dis = 广播里有人说：“我买了{sign}，{cue}天天用。”
suggest.sim = 说到{area}，有什么新点子吗？
suggest.dis = 今天有点无聊，有什么可看的吗？
suggest_reply.sim = 有些人{cue}会{act}，可以考虑一下。
suggest_reply.dis = 有些人{cue}会买{sign}，可以看看。
ask = {cond}哪种{label}最适合{who}？
guest = {name}要来做客，想{act}。
shop = 这里有家店在卖{sign}。
today = 就今天破个例，我想{act}。
know = 有人买了{sign}，这是为哪种{label}准备的？
ack = 好的，谢谢你告诉我。
ack = 明白了，还有别的事吗？
"""

_ZH_STORY = """
set.sim = 前几天饭桌上聊起{area}，我就一句话：我{cue}总是{act}。
set.sim = 在{area}这件事上我很好懂，{cue}就是{act}。
set.dis = 我的行李里{cue}总有{sign}，用得都旧了。
cond.sim = 饭桌上聊起{area}，我就一句话：{cond}我{cue}总是{act}。
cond.dis = {cond}我手边{cue}总有{sign}，用得都旧了。
temp.sim = 在{area}这件事上，我{cue}就是{act}，不过只到{until}为止，过后恢复原样。
temp.dis = 亲戚把{sign}借给我到{until}，我{cue}用得很勤，过后换回自己的。
pair.sim = 在{area}这件事上我三心二意，{cue}不是{act}就是{act2}。
pair.dis = 我的行李里{cue}既有{sign}，也有{sign2}，摸到哪样用哪样。
narrow.sim = 我提过的两种{area}里，{v}{cue}算是过去了，只剩另一种。
narrow.dis = {sign}{cue}让收旧货的拿走了，行李里只剩另外那样。
revert.sim = 在{area}这件事上，试验{cue}结束了，我不再{act}，老习惯又回来了。
revert.dis = {sign}{cue}让收旧货的拿走了，我原先的东西又从箱子里出来了。
not.sim = 饭桌上聊起{area}，我就一句话：我{cue}可不{act}。
not.dis = 我的行李里{cue}找不到{sign}。
same.sim = 在{area}这件事上，{who}怎样我{cue}就怎样。
same.dis = {who}有的东西，我也置办了一份，{cue}用得都旧了。
third.sim = 饭桌上聊起{area}，{who}就一句话：{cue}总是{act}。
third.dis = {who}的行李里{cue}总有{sign}，用得都旧了。
third_not.sim = 饭桌上聊起{area}，{who}就一句话：{cue}绝不{act}。
third_not.dis = {who}的行李里{cue}找不到{sign}。
hyp.sim = 饭桌上聊起{area}，若有来生，我{cue}大概会{act}。
hyp.dis = 若有来生，我的行李里{cue}大概会有{sign}。
quote.sim = 电影主角谈{area}，有句台词：“我{cue}总是{act}。”
quote.dis = 电影主角有句台词：“我的行李里{cue}总有{sign}。”
suggest.sim = 想听听{area}方面都有哪些可能。
suggest.dis = 下午空着，还没有安排。
suggest_reply.sim = {cue}不妨{act}，哪天有兴致再说。
suggest_reply.dis = {cue}不妨借来{sign}，哪天有兴致再说。
ask = 综合来看，{cond}该给{who}安排哪样{label}？
guest = 客人{name}马上到，只有一个愿望：{act}。
shop = 对面摊子上摆着{sign}。
today = 今天例外，我把习惯放一放，想{act}。
know = 包裹里是{sign}，这是为哪样{label}买的？
ack = 说得很清楚，谢谢。
ack = 有道理，想聊随时找我。
"""

# Spanish: in test only

_ES_TEST = """
bebida caliente | bebidas calientes | tomar {v} como bebida caliente
mate = una calabaza hueca y una bombilla de metal
café = un molinillo y filtros de papel
manzanilla = flores secas para calmar el estómago
chocolate = un molinillo de madera y tabletas de cacao
té rojo = hojas prensadas de Yunnan

deporte | deportes | practicar {v} como deporte
esgrima = una careta de malla y un florete
natación = gafas y un gorro de silicona
escalada = magnesio y una cuerda larga
remo = un par de palas largas y parches para ampollas
pelota vasca = una cesta curva de mimbre

postre | postres | comer {v} de postre
flan = moldes pequeños y caramelo líquido
torrijas = rebanadas duras, leche y canela
turrón = almendras, miel y obleas
helado = una cubeta fría y barquillos
arroz con leche = granos redondos y una rama de canela

instrumento | instrumentos | tocar {v}
la guitarra = seis cuerdas y una cejilla
el cajón = una caja de madera para sentarse y golpear
la gaita = un fuelle de cuero y un roncón
la flauta = una varilla de limpieza y clases de respiración
el acordeón = dos correas para los hombros y un fuelle de cartón

pasatiempo | pasatiempos | dedicar las tardes al {v}
ajedrez = un reloj doble y treinta y dos piezas torneadas
ganchillo = una aguja corta y ovillos de algodón
dibujo = carboncillos y un bloc de hojas gruesas
dominó = veintiocho fichas con puntos
bricolaje = un taladro y una caja de tornillos
"""

_ES_PLAIN = """
set.sim = En cuanto a {area}, yo suelo {act}{cue}.
set.sim = Hablando de {area}, lo mío es {act}{cue}.
set.dis = En mi mesa hay {sign}{cue}, todo muy usado.
set.dis = No salgo de viaje sin {sign}{cue}.
cond.sim = En cuanto a {area}, {cond} yo suelo {act}{cue}.
cond.dis = {cond} tengo en mi mesa {sign}{cue}, todo muy usado.
temp.sim = En cuanto a {area}, hasta el {until} me toca {act}{cue}; después, lo de antes.
temp.dis = Me han prestado {sign} hasta el {until} y no uso otra cosa{cue}; después, lo de antes.
pair.sim = En cuanto a {area}, me da igual {act} que {act2}{cue}.
pair.dis = En mi mesa hay {sign}, y al lado {sign2}{cue}, todo muy usado.
narrow.sim = De mis dos {area} he dejado {v}{cue}; me quedo solo con lo otro.
narrow.dis = He regalado {sign}{cue} y me quedo solo con lo otro.
revert.sim = En cuanto a {area}, ya he dejado de {act}{cue} y he vuelto a lo de antes.
revert.dis = He vendido {sign}{cue} y he vuelto a lo de antes.
not.sim = En cuanto a {area}, lo mío no es {act}{cue}.
not.dis = En mi mesa no hay {sign}{cue}.
same.sim = En cuanto a {area}, hago exactamente lo mismo que {who}{cue}.
same.dis = Lo que compró {who} lo compré yo también y lo uso a diario{cue}.
third.sim = En cuanto a {area}, {who} suele {act}{cue}.
third.dis = En la mesa de {who} hay {sign}{cue}, todo muy usado.
third_not.sim = En cuanto a {area}, {who} se niega a {act}{cue}.
third_not.dis = En la mesa de {who} no hay {sign}{cue}.
hyp.sim = En cuanto a {area}, si me tocara la lotería me gustaría {act}{cue}.
hyp.dis = Si me tocara la lotería tendría en mi mesa {sign}{cue}.
quote.sim = En cuanto a {area}, en la radio dijo uno: «Yo suelo {act}{cue}».
quote.dis = En la radio dijo uno: «No salgo de viaje sin {sign}{cue}».
suggest.sim = En cuanto a {area}, ¿qué ideas hay?
suggest.dis = Hoy me aburro. ¿Hay algo que mirar?
suggest_reply.sim = Hay quien prefiere {act}{cue}. Es una idea, nada más.
suggest_reply.dis = Hay quien compra {sign}{cue}. Es una idea, nada más.
ask = Hablando de {area}, ¿qué {label} va mejor para {who}{cond}?
ask = En cuanto a {area}, hay que elegir {label} para {who}{cond}. ¿Cuál sería?
guest = Viene de visita {name}, que quiere {act}.
shop = Aquí al lado venden {sign}.
today = Solo por hoy, como excepción, quiero {act}.
know = Alguien ha comprado {sign}. En cuanto a {area}, ¿para qué {label} es?
ack = Entendido, gracias por contármelo.
ack = Muy bien. ¿Algo más?
"""

# Small talk that holds no topic: user = assistant.

_TASKS = {
    ("en", "train"): """
What is {n} times {m}? = It is {p}.
Please make this sound more polite: send the {thing} today. = Could you please send the {thing} today?
Set a timer for {n} minutes. = The timer runs for {n} minutes.
How do you spell "{thing}" backwards? = Letter by letter, from the end: {back}.
I locked myself out at number {n} again. = Sorry to hear that. Is there someone with a key?
Write a title for a report on the {thing}. = "The {thing}: findings and open points".
My flight leaves from gate {n}, I hope. = Gates do change, the screens will tell.
""",
    ("en", "test"): """
Add {n} and {m} for me. = That makes {s}.
The meeting about the {thing} lasted {n} minutes. = That sounds long. Was anything decided?
Could you shorten "the {thing} which was delivered yesterday"? = "Yesterday's {thing}".
I am stuck in room {n} with a broken {thing}. = Perhaps the caretaker can help.
Draft one line to say that the {thing} will be late. = "I am sorry, the {thing} will be late."
Is {n} an even number? = It is {even}.
My train has {n} minutes of delay. = I hope that the connection waits.
""",
    ("zh", "train"): """
帮我算一下{n}乘以{m}。 = 等于{p}。
请定一个{n}分钟的闹钟。 = 好的，{n}分钟后提醒。
把“快把{thing}寄来”改得客气些。 = “麻烦您方便时把{thing}寄来”。
我住{n}号房，钥匙又忘带了。 = 问问前台有没有备用的。
""",
    ("zh", "test"): """
{n}加{m}是多少？ = 是{s}。
关于{thing}的会开了{n}分钟。 = 真久，有结论吗？
写一句话说{thing}会晚到。 = “抱歉，{thing}会晚一些到。”
火车晚点{n}分钟了。 = 希望还能赶上换乘。
""",
    ("es", "test"): """
Suma {n} y {m}, por favor. = Son {s}.
La reunión duró {n} minutos. = Qué larga. ¿Se decidió algo?
Escribe una línea que diga que se retrasa {thing}. = «Lo siento, se retrasa {thing}.»
Mi tren lleva {n} minutos de retraso. = Ojalá espere el enlace.
""",
}

_THINGS = {
    "en": "printer, contract, ladder, invoice, poster, keyboard, survey, carpet, brochure, curtain",
    "zh": "打印机, 合同, 梯子, 发票, 海报, 键盘, 问卷, 地毯",
    "es": "la impresora, el contrato, la escalera, la factura, el cartel, el teclado, la alfombra",
}

LANGUAGES = {
    "en": Language(
        cues=(" these days", " at the moment", " lately", " right now"),
        people=(
            *("my sister", "my brother", "my neighbour", "my colleague", "my cousin"),
            *("my aunt", "my uncle", "my flatmate", "my boss", "my dentist"),
        ),
        spare="my landlord",
        me="me",
        guests=("Ilse", "Marek", "Tove", "Idris", "Nell", "Oskar"),
        conditions=(
            ("on weekdays", "at weekends"),
            ("when I am alone", "when I have company"),
            ("when it rains", "when the sun shines"),
            ("in the first half of the month", "in the second half of the month"),
        ),
        months=(
            *("January", "February", "March", "April", "May", "June", "July"),
            *("August", "September", "October", "November", "December"),
        ),
        date="{day} {month} {year}",
    ),
    "zh": Language(
        cues=("这阵子", "目前", "近来", "眼下"),
        people=("我姐姐", "我弟弟", "我邻居", "我同事", "我表妹", "我姑姑"),
        spare="我房东",
        me="我",
        guests=("小鹿", "老魏", "阿蓉", "志远"),
        conditions=(
            ("工作日", "周末"),
            ("一个人的时候", "朋友来的时候"),
            ("下雨天", "大晴天"),
            ("上半月", "下半月"),
        ),
        months=tuple(str(i) for i in range(1, 13)),
        date="{year}年{month}月{day}日",
    ),
    "es": Language(
        cues=(" últimamente", " en estos momentos", " hoy en día", " estos días"),
        people=("mi hermana", "mi hermano", "mi vecina", "mi colega", "mi prima", "mi tío"),
        spare="mi casero",
        me="mí",
        guests=("Irune", "Mateo", "Alba", "Nuño"),
        conditions=(
            ("entre semana", "los fines de semana"),
            ("a solas", "en compañía"),
            ("cuando llueve", "cuando hace sol"),
        ),
        months=(
            *("enero", "febrero", "marzo", "abril", "mayo", "junio", "julio"),
            *("agosto", "septiembre", "octubre", "noviembre", "diciembre"),
        ),
        date="{day} de {month} de {year}",
    ),
}


def _topics(text: str) -> tuple[Topic, ...]:
    found = []
    for block in text.strip().split("\n\n"):
        head, *rows = block.split("\n")
        label, area, act = head.split(" | ")
        signs = dict(row.split(" = ") for row in rows)
        found.append(Topic(label, area, act, tuple(signs), signs))
    return tuple(found)


def _frames(text: str) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for line in text.strip().split("\n"):
        key, frame = line.split(" = ", 1)
        found[key] = (*found.get(key, ()), frame)
    return found


def _tasks(text: str) -> tuple[tuple[str, str], ...]:
    return tuple(tuple(line.split(" = ")) for line in text.strip().split("\n"))


TOPICS = {
    "train": {"en": _topics(_EN_TRAIN), "zh": _topics(_ZH_TRAIN)},
    "dev": {"en": _topics(_EN_DEV), "zh": _topics(_ZH_DEV)},
    "test": {"en": _topics(_EN_TEST), "zh": _topics(_ZH_TEST), "es": _topics(_ES_TEST)},
}
FAMILIES = {
    name: _frames(text)
    for name, text in (
        *(("en_plain", _EN_PLAIN), ("en_talk", _EN_TALK), ("zh_plain", _ZH_PLAIN)),
        *(("en_account", _EN_ACCOUNT), ("en_banter", _EN_BANTER), ("en_notes", _EN_NOTES)),
        *(("zh_story", _ZH_STORY), ("es_plain", _ES_PLAIN)),
    )
}
# dev tunes what is trained on train: other users, topics and values, the frames of train. The
# telegraphic en_notes and all Spanish have no counterpart outside test.
SPLIT_FAMILIES = {
    "train": {"en": ("en_plain", "en_talk"), "zh": ("zh_plain",)},
    "dev": {"en": ("en_plain", "en_talk"), "zh": ("zh_plain",)},
    "test": {
        "en": ("en_account", "en_banter", "en_notes"),
        "zh": ("zh_story",),
        "es": ("es_plain",),
    },
}
TASKS = {key: _tasks(text) for key, text in _TASKS.items()}
THINGS = {key: tuple(text.split(", ")) for key, text in _THINGS.items()}
